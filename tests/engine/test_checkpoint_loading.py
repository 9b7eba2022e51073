"""Loading a checkpoint: its precision, what is refused and why, and that its code is never run."""

import json
import re
from pathlib import Path

import pytest
import torch
from engine.engines import EMBEDDED, completions, engine_of, load, needs_compiled_kernels
from engine.logits import logits_of, oracle
from llama_engine.errors import MAX_LINE, CheckpointError
from llama_engine.model.loader import LoadedModel, loading
from llama_engine.model.precision import choose_device
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def _update_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _refusal(model: Path | str, quantization: str = "none", **parameters: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(quantization, model=str(model), **parameters)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_info_is_that_of_the_weights(fp32: LoadedModel, int8: LoadedModel) -> None:
    model = oracle(fp32)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    weights, outputs = sum(linear.weight.numel() for linear in linears), sum(linear.out_features for linear in linears)
    info = fp32.info
    assert (info.linears, fp32.name) == ({"float32": len(linears)}, str(EMBEDDED))
    assert info.weight_bytes == sum({tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}.values())
    needs_compiled_kernels()
    # The head isn't the embedding any more. A byte for each weight, a scale for each output.
    head = 4 * model.lm_head.weight.numel()
    assert int8.info.linears == {"int8": len(linears)}
    assert int8.info.weight_bytes == info.weight_bytes + head - 3 * weights + 4 * outputs
    assert f"layers {len(linears)} in int8, {int8.info.product}; " in int8.info.describe()


def test_the_compiled_kernels_keep_a_16_bit_embedding_as_saved(folder: Path, tokenizer: Tokenizer) -> None:
    needs_compiled_kernels()
    weights = folder / "model.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file({name: tensor.float() for name, tensor in rounded.items()}, weights, {"format": "pt"})
    wide = load("int8", model=str(folder))
    save_file(rounded, weights, {"format": "pt"})
    narrow = load("int8", model=str(folder))
    assert wide.info.weight_bytes - narrow.info.weight_bytes == 2 * rounded["model.embed_tokens.weight"].numel()
    tokens = tokenizer.encode("The with statement is used to wrap the execution of a block")
    assert torch.equal(logits_of(narrow, tokens), logits_of(wide, tokens))
    save_file({name: tensor.double() for name, tensor in rounded.items()}, weights, {"format": "pt"})
    assert load("int8", model=str(folder)).info.weight_bytes == wide.info.weight_bytes


@pytest.mark.parametrize(
    ("quantization", "parameters", "computation"),
    [
        ("int8", {}, r"exact INT8, two terms for outliers \(ratio 4\), by compiled AVX\S+ \w+: batch-invariant"),
        ("int8", {"int8_terms": "1"}, r"exact INT8, one term, by compiled AVX\S+ \w+: batch-invariant"),
        ("int8", {"int8_terms": "2"}, r"exact INT8, two terms, by compiled AVX\S+ \w+: batch-invariant"),
        ("int8", {"kernels": "stock"}, "INT8 weights dequantized to float32: not batch-invariant"),
        ("none", {}, "float32 weights: not batch-invariant"),
        ("none", {"dtype": "bfloat16"}, "bfloat16 weights: not batch-invariant"),
        ("int8", {"int8_threshold": "6"}, "float32 and int8 weights: not batch-invariant"),
    ],
)  # fmt: skip
def test_the_info_names_the_product(
    folder: Path, quantization: str, parameters: dict[str, str], computation: str
) -> None:
    if "compiled" in computation:
        needs_compiled_kernels()
    engine = engine_of(load(quantization, model=str(folder), **parameters), 1)
    labels = engine.description.labels
    assert re.fullmatch(computation, labels["computation"])
    assert labels["device"] == "cpu"
    assert labels["kv_cache_dtype"] == str(engine.plan.shape.dtype).removeprefix("torch.")


def test_stock_kernels_are_logged_with_their_cost(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load("int8", model=str(folder), kernels="stock")
    assert caplog.messages == [
        "kernels is stock: INT8 weights are dequantized: steps are slower and not batch-invariant"
    ]


def _save_in_int8(folder: Path, path: Path, tokenizer: Tokenizer, threshold: float = 0.0) -> Path:
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(path)
    tokenizer.pretrained.save_pretrained(path)
    return path


def test_a_saved_outlier_threshold_is_ignored(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    needs_compiled_kernels()
    path = _save_in_int8(folder, tmp_path / "saved", tokenizer, threshold=6.0)
    info = load("checkpoint", model=str(path)).info
    assert (info.threshold, info.batch_invariant) == (0.0, True)
    chosen = load("checkpoint", model=str(path), int8_threshold="5").info
    assert (chosen.threshold, chosen.batch_invariant) == (5.0, False)


def test_the_settings_override_threshold_dtype_and_length(folder: Path) -> None:
    assert "outlier threshold 6; " in load("int8", model=str(folder), int8_threshold="6").info.describe()
    checkpoint = load("none", model=str(folder), dtype="bfloat16", max_model_len="99")
    assert (checkpoint.info.linears, checkpoint.info.dtype) == ({"bfloat16": 15}, torch.bfloat16)
    engine = engine_of(checkpoint, 1)
    assert (engine.plan.shape.dtype, engine.max_model_len) == (torch.bfloat16, 99)
    # The model has 128 positions.
    assert load("none", model=str(folder), max_model_len="128").max_model_len == 128
    assert _refusal(folder, max_model_len="129") == f"max_model_len is 129; {folder} has 128 positions"


def test_dynamic_rope_serves_more_positions_than_were_trained(folder: Path) -> None:
    _update_json(folder / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert load("none", model=str(folder), max_model_len="256").max_model_len == 256


def test_nf4_loads_and_generates(folder: Path) -> None:
    checkpoint = load("nf4", model=str(folder))
    assert checkpoint.info.linears == {"nf4": 14, "float32": 1}
    request = GenerationRequest(prompt="", prompt_tokens=(5, 6, 7), max_tokens=6, min_tokens=6)
    assert completions(engine_of(checkpoint, 2), [request])[0].num_output_tokens == 6


def test_a_saved_8_bit_checkpoint_is_loaded_bit_for_bit(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    original, path = load("int8", model=str(folder)), _save_in_int8(folder, tmp_path / "saved", tokenizer)
    tokens = tokenizer.encode("The with statement is used to wrap the execution of a block")
    for quantization in ("int8", "checkpoint"):
        saved = load(quantization, model=str(path))
        assert saved.info == original.info
        assert torch.equal(logits_of(saved, tokens), logits_of(original, tokens))
    for quantization in ("none", "nf4"):
        assert _refusal(path, quantization) == (
            f"quantization is {quantization!r}, but {path} is saved in int8; "
            "set quantization to 'checkpoint' to serve it as it is"
        )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"blocksize": 0}, "'blocksize': 0"),
        ({"shape": [128, 64]}, "'shape': [128, 64]"),
        ({"quant_type": "fp4"}, "'quant_type': 'fp4'"),
        ({"blocksize": "64"}, "TypeError: "),
    ],
)
def test_a_description_that_does_not_fit_its_nf4_weights_is_refused(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer, changed: dict[str, object], reason: str
) -> None:
    """bitsandbytes' kernels would read beyond the scales."""
    config, path = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(path)
    tokenizer.pretrained.save_pretrained(path)
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    state = f"{name}.quant_state.bitsandbytes__nf4"
    fields = {**json.loads(bytes(tensors[state].tolist())), **changed}
    tensors[state] = torch.tensor([*json.dumps(fields).encode()], dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    message = _refusal(path, "checkpoint")
    assert message.startswith(f"{path} has {state}")
    assert reason in message


@pytest.mark.parametrize("model", ["./absent", "~/absent-checkpoint", "a/b/c"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(model: str) -> None:
    assert _refusal(model) == f"model is {model!r}: no such folder or GGUF file"


def test_a_tokenizer_in_another_format_is_converted(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    expected = load("none", model=str(folder)).tokenizer.encode("def the class")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]))
    _update_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    assert load("none", model=str(folder)).tokenizer.encode_inside("def the class") == expected[1:]


def test_a_long_message_of_a_library_is_cut() -> None:
    with pytest.raises(CheckpointError) as refused, loading("it"):
        raise ValueError("a line\n" * 1000)
    assert str(refused.value).startswith("can't load it: ValueError: a line a line ")
    assert len(str(refused.value)) <= len("can't load it: ") + MAX_LINE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    assert choose_device("auto", None) == choose_device("cpu", None) == choose_device("cpu", 3) == torch.device("cpu")
    for setting, gpu in (("cuda", None), ("cuda", 0), ("auto", 0)):
        with pytest.raises(CheckpointError, match=f"device is '{setting}' .*PyTorch sees no GPU"):
            choose_device(setting, gpu)


@pytest.mark.parametrize(
    ("quantization", "changed"),
    [
        ("none", {"hidden_size": 1 << 20, "intermediate_size": 1 << 20}),
        ("nf4", {"num_hidden_layers": 4096}),
    ],
)
def test_a_config_of_a_larger_model_is_refused_by_the_files(
    folder: Path, quantization: str, changed: dict[str, int]
) -> None:
    """Before anything is allocated: the first one's weights are 96 TB."""
    _update_json(folder / "config.json", **changed)
    assert "weights or has them in another shape, first " in _refusal(folder, quantization)


@pytest.mark.parametrize("model_type", ["llama", "payload"])
def test_the_code_of_a_checkpoint_is_never_run(folder: Path, tmp_path: Path, model_type: str) -> None:
    """Neither for a Llama, of which transformers has its own, nor for a model that transformers does not know."""
    evidence = tmp_path / "ran"
    (folder / "payload.py").write_text(f"open({str(evidence)!r}, 'w')\nclass PayloadConfig: ...\n")
    auto_map = {
        "AutoConfig": "payload.PayloadConfig",
        "AutoModelForCausalLM": "payload.PayloadModel",
        "AutoTokenizer": ["payload.PayloadTokenizer", None],
    }
    _update_json(folder / "config.json", auto_map=auto_map, model_type=model_type)
    _update_json(folder / "tokenizer_config.json", auto_map=auto_map)
    if model_type == "llama":
        assert load("none", model=str(folder)).config.model_type == "llama"
    else:
        assert _refusal(folder).startswith(f"can't load {folder}: ")
    assert not evidence.exists()


def test_a_gpus_attention_is_not_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds a plan for each length, which takes longer than the step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        assert choose_device("auto", 1) == torch.device("cuda", 1)
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
