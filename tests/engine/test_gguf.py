"""GGUF: the config, the tensors and the integers of a file are those of the model it was made from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine.engines import EMBEDDED, completions, engine_of, load, needs_compiled_kernels
from engine.gguf_files import LLAMA3, MODELS, small_model, write_model
from gguf import GGMLQuantizationType as Kind
from llama_engine.checkpoint.architecture import read_architecture
from llama_engine.checkpoint.formats.gguf import GgufBlocks
from llama_engine.checkpoint.gguf.config import read_gguf_config
from llama_engine.checkpoint.gguf.header import GgufFile, read_gguf
from llama_engine.checkpoint.gguf.tensors import GgufTensors
from llama_engine.checkpoint.headers import read_checkpoint_headers
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError
from llama_engine.kernels.cpu.forward import PackedLlama
from llama_engine.model.llama import Llama
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.tokenizer import Tokenizer

from models.gguf_checkpoints import write

DOWN = SavedLinear("model.layers.0.mlp.down_proj", (256, 512))
QUERY = SavedLinear("model.layers.1.self_attn.q_proj", (256, 256))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    model_type, changed = MODELS[request.param]
    return small_model(model_type, **changed)


@pytest.fixture(scope="module")
def path(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "it.gguf", model)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return read_gguf(write_model(tmp_path_factory.mktemp("llama") / "it.gguf", small_model("llama")))


@pytest.fixture(scope="module")
def q4_k_m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded checkpoint; the values' type is another than queries' and keys' in some layers."""
    return write(EMBEDDED, "q4_k_m", tmp_path_factory.mktemp("q4_k_m") / "it.gguf")


def _saved(path: Path) -> SavedTensors:
    return read_checkpoint_headers(path, "it").saved


def _blocks(path: Path) -> GgufBlocks:
    return GgufBlocks(_saved(path))


def _by_package(path: Path, name: str) -> torch.Tensor:
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))


def _served(path: Path, kind: Kind) -> tuple[LinearWeight, torch.Tensor]:
    """A layer of a file in one type, and the package's floats of it."""
    write_model(path, small_model("qwen2"), kind)
    return _blocks(path).read(DOWN), _by_package(path, "blk.0.ffn_down.weight")


def _generate(checkpoint: LoadedModel) -> str:
    request = GenerationRequest(prompt="", prompt_tokens=checkpoint.tokenizer.encode("import os\n"), max_tokens=12)
    return completions(engine_of(checkpoint), [request])[0].text


def test_the_config_is_the_models(model: torch.nn.Module, path: Path) -> None:
    config: Any = model.config
    read = read_gguf_config(read_gguf(path))
    # A Mistral without windows is a Llama, and is saved as one.
    model_type = "llama" if config.model_type == "mistral" else config.model_type
    assert read_architecture(read, "it") == replace(read_architecture(config, "it"), model_type=model_type)
    assert read.rope_parameters == config.rope_parameters
    assert read.max_position_embeddings == config.max_position_embeddings


def test_the_tensors_are_the_models(model: torch.nn.Module, path: Path) -> None:
    config: Any = model.config
    saved = _saved(path)
    expected = model.state_dict()
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        gain = config.model_type.startswith("gemma") and name.endswith("norm.weight")
        assert torch.equal(saved.read(name), tensor + 1 if gain else tensor), name


def test_rows_are_read_from_the_middle_of_a_head(tmp_path: Path) -> None:
    model = small_model("llama")
    saved = _saved(write_model(tmp_path / "it.gguf", model, Kind.F16))
    weight = model.state_dict()[f"{QUERY.name}.weight"].half()
    assert torch.equal(saved.read(f"{QUERY.name}.weight", slice(7, 201)), weight[7:201])


@pytest.mark.parametrize(
    ("kind", "bits", "offsets"),
    [(Kind.Q8_0, 8, False), (Kind.Q4_0, 4, False), (Kind.Q4_1, 4, True), (Kind.Q4_K, 4, True)],
)
def test_the_integers_are_served_as_saved(kind: Kind, bits: int, offsets: bool, tmp_path: Path) -> None:
    served, floats = _served(tmp_path / "it.gguf", kind)
    assert (served.bits, served.group_size, served.offsets is not None) == (bits, 32, offsets)
    torch.testing.assert_close(served.dequantized(), floats, rtol=1e-6, atol=1e-8)
    assert bits == 8 or (served.weight.min() >= -8 and served.weight.max() <= 7)


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.TQ1_0])
def test_other_types_are_rounded_to_8_bit_groups(kind: Kind, tmp_path: Path) -> None:
    served, floats = _served(tmp_path / "it.gguf", kind)
    assert (served.bits, served.group_size, served.offsets) == (8, 32, None)
    error = (served.dequantized() - floats).abs().view(256, -1, 32).amax(2)
    assert (error <= floats.abs().view(256, -1, 32).amax(2) / 253).all()


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = small_model("qwen2")
    model.state_dict()[f"{DOWN.name}.weight"][3, 40] = 1e9
    # A scale beyond float16's range.
    with np.errstate(over="ignore"):
        blocks = _blocks(write_model(tmp_path / "it.gguf", model, Kind.Q8_0))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight has scales that aren't finite"):
        blocks.read(DOWN)


def test_unknown_divisors_of_rope_are_kept(tmp_path: Path) -> None:
    model = small_model("llama", rope_parameters={**LLAMA3, "low_freq_factor": 2.0})
    rope = read_gguf_config(read_gguf(write_model(tmp_path / "it.gguf", model))).rope_parameters
    assert (rope["rope_type"], rope["attention_factor"], max(rope["long_factor"])) == ("longrope", 1.0, 32.0)


def test_a_value_out_of_bounds_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "it.gguf", small_model("llama"), metadata={"llama.attention.head_count_kv": 3})
    message = "num_key_value_heads is 3; it must be a divisor of num_attention_heads, 4"
    with pytest.raises(CheckpointError, match=f"it: its metadata: {message}"):
        read_checkpoint_headers(tmp_path, "it")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "it is of architecture 'mamba'; this engine serves llama, "),
        ({"llama.expert_count": 8}, "it has 8 experts; this engine serves dense models"),
        ({"llama.rope.dimension_count": 32}, "RoPE has 32 of 64 dimensions"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.attention.sliding_window": 64}, "it has a sliding window"),
        ({"llama.attention.value_length": 32}, "its keys have 64 dimensions and its values 32"),
        ({"llama.block_count": 3}, "it has tensors of more than 3 layers"),
        ({"llama.block_count": 1 << 31}, "it has 2147483648 layers and 39 tensors"),
        ({"llama.context_length": 1 << 31}, "context_length is 2147483648, above"),
        ({"llama.attention.key_length": 1 << 31}, "4 heads of 2147483648 dimensions aren't 256"),
        ({"llama.attention.head_count": (4, 4, 4, 4)}, "llama.attention.head_count is (4, 4, 4, 4), not a finite"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is nan, not a finite number"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(metadata: dict[str, Any], message: str, llama: GgufFile) -> None:
    with pytest.raises(CheckpointError) as refused:
        read_gguf_config(replace(llama, metadata={**llama.metadata, **metadata}))
    assert str(refused.value).startswith(f"can't load {llama.path}: {message}")


def test_a_tensor_of_an_unknown_name_is_refused(tmp_path: Path) -> None:
    headers = read_checkpoint_headers(write_model(tmp_path / "it.gguf", small_model("qwen3")), "it")
    assert headers.gguf is not None
    renamed = {name.replace("ffn_gate", "ffn_gate_exps"): tensor for name, tensor in headers.gguf.tensors.items()}
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_gate_exps\.weight' isn't one of a qwen3"):
        GgufTensors(replace(headers.gguf, tensors=renamed), headers.architecture)


def test_a_quantized_file_is_served(q4_k_m: Path, fp32: LoadedModel) -> None:
    needs_compiled_kernels()
    served = load("checkpoint", model=str(q4_k_m))
    assert served.info.linears == {"int4": 34, "int8": 9}
    assert isinstance(served.model, PackedLlama)
    tokens = torch.tensor([7, 0, 255, 7])
    assert torch.equal(served.model.embedding.look_up(tokens), _by_package(q4_k_m, "token_embd.weight")[tokens])
    assert served.model.embedding.rows.dtype == torch.uint8
    assert _generate(served)[:12] == _generate(fp32)[:12]


def test_without_quantization_a_file_is_served_dequantized(q4_k_m: Path) -> None:
    served = load("none", model=str(q4_k_m))
    assert served.info.linears == {"float32": 43}
    assert isinstance(served.model, Llama)
    # Products with the identity are exact.
    assert torch.equal(served.model.head(torch.eye(256)).T, _by_package(q4_k_m, "token_embd.weight"))


def test_nf4_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nf4 and an int8_threshold need a checkpoint in safetensors"):
        load("nf4", model=str(write(EMBEDDED, "bf16", tmp_path / "it.gguf")))


def test_the_tokenizer_is_the_models(q4_k_m: Path, tokenizer: Tokenizer) -> None:
    read = load("none", model=str(q4_k_m)).tokenizer
    texts = ["def f(x):\n    return x  # 12345", "  two  spaces, é ☃ 🙂", "<s>[INST]</s><|endoftext|>"]
    assert [read.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    assert read.vocabulary.token_bytes == tokenizer.vocabulary.token_bytes
    assert read.pretrained.chat_template == tokenizer.pretrained.chat_template
