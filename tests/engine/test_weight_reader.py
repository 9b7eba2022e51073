"""The weight reader returns what transformers loads, bit for bit, fused, in private memory."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import int8_vectorwise_quant
from engine.checkpoints import save_small
from engine.quantized_layers import gptq_config
from llama_engine.checkpoint import per_channel as row_blocks
from llama_engine.checkpoint.architecture import read_architecture
from llama_engine.checkpoint.formats.detection import linear_format
from llama_engine.checkpoint.tensor_names import layer_linears
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weight_reader import WeightReader
from llama_engine.errors import CheckpointError
from llama_engine.model.precision import quantization_config
from llama_engine.text.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from models.quantized_checkpoints import gptq, quantize

WEIGHTS = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BIASES, TIED = {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}
LACKS = "weights or has them in another shape, first"


def _reader(folder: Path, int8: bool = False, dtype: torch.dtype = torch.float32) -> WeightReader:
    config = LlamaConfig.from_pretrained(folder)
    saved = SavedTensors(folder)
    quantized = linear_format(saved, quantization_config(config)) if int8 else None
    return WeightReader(saved, read_architecture(config, str(folder)), dtype, quantized, int8)


def _by_transformers(folder: Path, int8: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    quantization: dict[str, Any] = {}
    if int8 and "quantization_config" not in json.loads((folder / "config.json").read_text()):
        quantization["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": "cpu"}, **quantization)
    assert isinstance(model, LlamaForCausalLM)
    return model


def _with(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replace or remove tensors of a checkpoint in one file."""
    saved = {**load_file(folder / WEIGHTS), **tensors}
    save_file(
        {name: tensor for name, tensor in saved.items() if tensor is not None}, folder / WEIGHTS, {"format": "pt"}
    )
    return folder


def _in_shards(folder: Path) -> None:
    """Save a checkpoint again in files so small that a layer is in more than one."""
    _by_transformers(folder).save_pretrained(folder, max_shard_size="100KB")
    assert json.loads((folder / f"{WEIGHTS}.index.json").read_text())["weight_map"][f"{DOWN}.weight"] != WEIGHTS


def _with_random_biases(folder: Path) -> None:
    saved = load_file(folder / WEIGHTS)
    _with(folder, **{name: torch.rand(len(bias)) for name, bias in saved.items() if name.endswith("bias")})


def _with_head(scale: float, embedding: bool = True) -> Callable[[Path], object]:
    """Save a head that is a multiple of the embedding, with or without the embedding."""

    def change(folder: Path) -> None:
        saved = load_file(folder / WEIGHTS)[EMBEDDING]
        _with(folder, **{HEAD: saved * scale, EMBEDDING: saved if embedding else None})

    return change


def _without_head(folder: Path) -> None:
    """The names of such a file have no `model.` before them."""
    _by_transformers(folder).model.save_pretrained(folder)
    assert "embed_tokens.weight" in load_file(folder / WEIGHTS)


def _assert_equal(read: torch.Tensor | None, expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    assert read is not None
    assert read.dtype == dtype
    assert torch.equal(read, torch.cat(expected).to(dtype))


def _assert_same(reader: WeightReader, model: LlamaForCausalLM, int8: bool, dtype: torch.dtype = torch.float32) -> None:
    """Compare every tensor with that of a model, whose head is in floats even if its linear layers are in INT8."""
    for index, layer in enumerate(model.model.layers):
        read = reader.layer(index)
        for name, parts in layer_linears(read_architecture(model.config, "it")).items():
            linear = getattr(read, name)
            linears: list[Any] = [layer.get_submodule(part.name) for part in parts]
            _assert_equal(linear.weight, [part.weight for part in linears], torch.int8 if int8 else dtype)
            if int8:
                _assert_equal(linear.scales, [part.weight.SCB / 127 for part in linears], torch.float32)
            if linears[0].bias is None:
                assert linear.bias is None
            else:
                _assert_equal(linear.bias, [part.bias for part in linears], dtype)
        _assert_equal(read.attention_norm, [layer.input_layernorm.weight], dtype)
        _assert_equal(read.mlp_norm, [layer.post_attention_layernorm.weight], dtype)
    _assert_equal(reader.norm(), [model.model.norm.weight], dtype)
    _assert_equal(reader.embedding(), [model.model.embed_tokens.weight], dtype)
    head = reader.head()
    if int8:
        weight, scales, _ = int8_vectorwise_quant(model.lm_head.weight.to(torch.float16))
        _assert_equal(head.weight, [weight], torch.int8)
        _assert_equal(head.scales, [scales / 127], torch.float32)
    else:
        _assert_equal(head.weight, [model.lm_head.weight], dtype)
        assert head.scales is None


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("saved", "dtype"),
    [(torch.float32, torch.float32), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)],
)
def test_the_weights_are_those_that_transformers_loads(
    folder: Path, saved: torch.dtype, dtype: torch.dtype, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=saved)
    # Columns of zeros, as of pruned models, and rows of them.
    model.model.layers[0].mlp.up_proj.weight.data[3] = 0
    model.model.layers[0].mlp.up_proj.weight.data[:, 5] = 0
    model.save_pretrained(folder)
    # Seven rows of the widest matrix, so that matrices end with a block that is not whole.
    monkeypatch.setattr(row_blocks, "BLOCK", 7 * 128)
    _assert_same(_reader(folder, int8, dtype), _by_transformers(folder, int8, dtype), int8, dtype)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("changed", "prepare"),
    [
        (BIASES, _with_random_biases),
        ({"head_dim": 24}, None),
        ({}, _in_shards),
        *[(TIED, prepare) for prepare in (None, _with_head(2), _with_head(1, embedding=False), _without_head)],
    ],
)
def test_a_checkpoint_is_read_as_by_transformers(
    tmp_path: Path,
    tokenizer: Tokenizer,
    changed: dict[str, object],
    prepare: Callable[[Path], object] | None,
    int8: bool,
) -> None:
    folder = save_small(tmp_path / "small", tokenizer, **changed)
    if prepare is not None:
        prepare(folder)
    _assert_same(_reader(folder, int8), _by_transformers(folder, int8), int8)


def test_what_is_returned_is_not_mapped_from_the_files(folder: Path) -> None:
    reader = _reader(folder)
    layer, embedding, norm, head = reader.layer(0), reader.embedding(), reader.norm(), reader.head()
    assert layer.attention_norm is not None
    read = [layer.attention_norm, layer.down.weight, layer.query_key_value.weight, head.weight]
    before = [tensor.clone() for tensor in (*read, embedding, norm)]
    # In place, so that mapped tensors would change.
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(20_000)
        file.write(bytes((folder / WEIGHTS).stat().st_size - 20_000))
    assert all(torch.equal(*pair) for pair in zip((*read, embedding, norm), before, strict=True))
    assert str(folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("saved_in_int8", "int8", "tensors", "message"),
    [
        (False, True, {f"{DOWN}.weight": torch.zeros(64, 127)}, f"lacks 1 {LACKS} {DOWN}.weight"),
        (False, True, {HEAD: None, "model.norm.weight": torch.ones(1)}, f"lacks 2 {LACKS} lm_head.weight"),
        (False, False, {f"{DOWN}.weight": torch.zeros(64, 128).to(torch.float8_e4m3fn)},
         f"has {DOWN}.weight in 'F8_E4M3', not in F64, F32, F16, BF16"),
        (True, True, {f"{DOWN}.weight_format": torch.tensor(2, dtype=torch.uint8)},
         f"has {DOWN}.weight_format 2, not 0: rows"),
        (True, True, {f"{DOWN}.weight_format": torch.zeros(2, dtype=torch.uint8)},
         f"has {DOWN}.weight_format in shape (2,), not one number"),
        (True, True, {f"{DOWN}.SCB": None}, f"lacks 1 {LACKS} {DOWN}.SCB"),
        (True, False, {}, "has model.layers.0.mlp.down_proj.weight in 'I8', not in F64, F32, F16, BF16"),
    ],
)  # fmt: skip
def test_unusable_weights_are_refused_by_name(
    folder: Path, saved_in_int8: bool, int8: bool, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    if saved_in_int8:
        _by_transformers(folder, int8=True).save_pretrained(folder)
    with pytest.raises(CheckpointError) as refused:
        _reader(_with(folder, **tensors), int8)
    assert str(refused.value) == f"{folder} {message}"


def test_a_file_that_is_cut_off_after_its_header_was_read_is_refused(folder: Path) -> None:
    reader = _reader(folder)
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate((folder / WEIGHTS).stat().st_size - 64)
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS} ends inside model\.norm\.weight$"):
        reader.norm()


def test_tensors_that_are_not_a_llamas_are_ignored_with_one_log_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _reader(_with(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert caplog.messages == []
    _with(folder, **{"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64), "zzz": torch.zeros(1)})
    _assert_same(_reader(folder), _by_transformers(folder), int8=False)
    assert caplog.messages[:1] == [
        "2 saved tensors are not this model's and are ignored, first model.layers.0.self_attn.q_proj.lora_A.weight"
    ]


def test_a_linear_layer_left_in_floats_is_quantized_with_one_log_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _by_transformers(folder, int8=True)
    floats = load_file(folder / WEIGHTS)[f"{DOWN}.weight"]
    expected.save_pretrained(folder)
    _with(folder, **{f"{DOWN}.weight": floats, f"{DOWN}.SCB": None, f"{DOWN}.weight_format": None})
    reader = _reader(folder, int8=True)
    assert caplog.messages == [f"1 linear layers are saved in floats and quantized now, first {DOWN}.weight"]
    _assert_same(reader, expected, int8=True)


def test_a_quantized_head_is_read_as_saved(folder: Path) -> None:
    layer = quantize(load_file(folder / WEIGHTS)[HEAD], 4, 32, dtype=torch.float16)
    _with(folder, **{HEAD: None}, **{f"lm_head.{key}": tensor.contiguous() for key, tensor in gptq(layer).items()})
    saved = SavedTensors(folder)
    architecture = read_architecture(LlamaConfig.from_pretrained(folder), "small")
    head = WeightReader(saved, architecture, torch.float32, linear_format(saved, gptq_config(4, 32)), int8=True).head()
    assert torch.equal(head.dequantized(), layer.dequantized())
