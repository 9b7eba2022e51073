"""Loading a checkpoint: its precision, what is refused and why, and that its code is never run."""

import json
from pathlib import Path

import pytest
import torch
from engine.checkpoints import save_small
from engine.engines import completions, engine_of, load
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import EMBEDDED, Checkpoint, choose_device
from llama_engine.text.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return save_small(tmp_path / "small", tokenizer)


def _update_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _refusal(model: Path | str, quantization: str = "none", **parameters: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(quantization, model=str(model), **parameters)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_info_is_that_of_the_weights_and_nothing_trains(fp32: Checkpoint, int8: Checkpoint) -> None:
    layers = [module for module in fp32.model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    weights = sum(layer.weight.numel() for layer in layers)
    outputs = sum(layer.out_features for layer in layers)
    everything = {tensor.data_ptr(): tensor.nbytes for tensor in [*fp32.model.parameters(), *fp32.model.buffers()]}
    for checkpoint in (fp32, int8):
        assert not any(module.training for module in checkpoint.model.modules())
        assert not any(parameter.requires_grad for parameter in checkpoint.model.parameters())
    info = fp32.info
    assert info.linears == {"float32": len(layers) + 1}
    assert info.weight_bytes == sum(everything.values())
    assert (info.dtype, info.device, info.threshold) == (torch.float32, torch.device("cpu"), None)
    assert fp32.name == str(EMBEDDED)
    assert int8.info.linears == {"int8": len(layers), "float32": 1}
    # A byte for each of the layers' weights, and a scale for each of their outputs.
    assert int8.info.weight_bytes == info.weight_bytes - 4 * weights + weights + 4 * outputs
    assert (int8.info.dtype, int8.info.threshold) == (torch.float32, 0.0)
    described = f"layers 1 in float32, {len(layers)} in int8, outlier threshold 0, activations not rounded; "
    assert described in int8.info.describe()


def test_the_settings_override_threshold_dtype_and_length(folder: Path) -> None:
    assert load("int8", model=str(folder), int8_threshold="6").info.threshold == 6.0
    checkpoint = load("none", model=str(folder), dtype="bfloat16", max_model_len="99")
    assert (checkpoint.info.linears, checkpoint.info.dtype) == ({"bfloat16": 15}, torch.bfloat16)
    engine = engine_of(checkpoint, 1)
    assert (engine.plan.shape.dtype, engine.max_model_len) == (torch.bfloat16, 99)


def test_nf4_loads_and_generates(folder: Path) -> None:
    checkpoint = load("nf4", model=str(folder))
    assert checkpoint.info.linears == {"nf4": 14, "float32": 1}
    request = GenerationRequest(prompt="", prompt_tokens=(5, 6, 7), max_tokens=6, min_tokens=6)
    assert completions(engine_of(checkpoint, 2), [request])[0].num_output_tokens == 6


def test_a_saved_8_bit_checkpoint_is_loaded_bit_for_bit_and_in_no_other_precision(
    int8: Checkpoint, tmp_path: Path
) -> None:
    int8.model.save_pretrained(tmp_path)
    int8.tokenizer.pretrained.save_pretrained(tmp_path)
    ids = torch.tensor([int8.tokenizer.encode("The with statement is used to wrap the execution of a block")])
    for quantization in ("int8", "checkpoint"):
        saved = load(quantization, model=str(tmp_path))
        assert saved.info == int8.info
        with torch.inference_mode():
            assert torch.equal(saved.model(input_ids=ids).logits, int8.model(input_ids=ids).logits)
    for quantization in ("none", "nf4"):
        assert _refusal(tmp_path, quantization) == (
            f"quantization is {quantization!r}, but {tmp_path} is saved in int8; "
            "set quantization to 'checkpoint' to serve it as it is"
        )


@pytest.mark.parametrize("path", ["{}/absent", "./absent", "~/absent-checkpoint", "a/b/c"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path: Path, path: str) -> None:
    model = path.format(tmp_path)
    assert _refusal(model) == f"model is {model!r}: no such folder"


def test_a_model_other_than_a_llama_is_refused(folder: Path) -> None:
    _update_json(folder / "config.json", model_type="gpt2")
    assert _refusal(folder) == f"{folder} is a 'gpt2' checkpoint; this engine serves 'llama'"


def test_pickled_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    message = _refusal(folder)
    assert message.startswith(f"can't load {folder}: ")
    assert "safetensors" in message


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_weights_that_are_missing_or_of_another_shape_are_refused_by_name(folder: Path, quantization: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reason = "weights or has them in another shape, first model.layers"
    assert _refusal(folder, quantization).endswith(f"lacks 1 {reason}.1.mlp.up_proj.weight")
    _update_json(folder / "config.json", intermediate_size=256)
    assert f"{reason}.0.mlp.down_proj" in _refusal(folder)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", "{}", "ValueError: Unrecognized model"),
        ("config.json", None, "ValueError: Unrecognized model"),
        ("tokenizer.json", "{}", "KeyError: "),
        ("tokenizer.json", None, "ValueError: Couldn't instantiate the backend tokenizer"),
        ("generation_config.json", '{"temperature": ', "generation_config.json: it is not valid JSON"),
    ],
)
def test_a_missing_or_malformed_file_is_refused_in_one_line(
    folder: Path, file: str, content: str | None, reason: str
) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    assert _refusal(folder).startswith(f"can't load {folder}: {reason}")


def test_a_generation_config_outside_the_contract_is_refused_when_an_engine_is_made(folder: Path) -> None:
    _update_json(folder / "generation_config.json", do_sample=True, top_p=1.5)
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: top_p is 1\.5; it must be in \(0, 1\]$"):
        engine_of(load("none", model=str(folder)), 1)


def test_max_model_len_is_bounded_by_the_models_positions(folder: Path) -> None:
    assert load("none", model=str(folder), max_model_len="128").max_model_len == 128
    assert _refusal(folder, max_model_len="129") == f"max_model_len is 129; {folder} has 128 positions"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_and_not_the_cpu() -> None:
    assert choose_device("auto", None) == choose_device("cpu", None) == choose_device("cpu", 3) == torch.device("cpu")
    for setting, gpu in (("cuda", None), ("cuda", 0), ("auto", 0)):
        with pytest.raises(CheckpointError, match=f"device is '{setting}' .*PyTorch sees no GPU"):
            choose_device(setting, gpu)


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
