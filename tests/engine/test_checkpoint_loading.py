"""Loading a checkpoint: its precision, what is refused and why, and that its code is never run."""

import json
from pathlib import Path

import pytest
import torch
from engine.engines import completions, engine_of, load
from engine.small_checkpoints import save_small
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import EMBEDDED, Checkpoint, choose_device
from llama_engine.text.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return save_small(tmp_path / "small", tokenizer)


def update_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refusal(model: Path | str, quantization: str = "none", **parameters: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(quantization, model=str(model), **parameters)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def linear_sizes(config: LlamaConfig) -> tuple[int, int]:
    """Return the parameters and output features of all linear layers except the head."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    assert head is not None
    queries, keys = config.num_attention_heads * head, (config.num_key_value_heads or 0) * head
    parameters = hidden * (2 * queries + 2 * keys + 3 * inner)
    features = queries + 2 * keys + hidden + 2 * inner + hidden
    return config.num_hidden_layers * parameters, config.num_hidden_layers * features


def other_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of everything else in float32: embedding, head if it isn't the embedding, norms, buffers."""
    config = checkpoint.config
    embeddings: int = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    buffers: dict[int, int] = {
        buffer.data_ptr(): buffer.nbytes for buffer in checkpoint.model.model.rotary_emb.buffers()
    }
    return 4 * (embeddings + (2 * config.num_hidden_layers + 1) * config.hidden_size) + sum(buffers.values())


def test_the_info_of_fp32_is_that_of_its_weights(fp32: Checkpoint) -> None:
    parameters, _ = linear_sizes(fp32.config)
    info = fp32.info
    assert info.linears == {"float32": 7 * fp32.config.num_hidden_layers + 1}
    assert info.weight_bytes == 4 * parameters + other_bytes(fp32)
    assert (info.dtype, info.device, info.threshold) == (torch.float32, torch.device("cpu"), None)
    assert fp32.name == str(EMBEDDED)


def test_the_info_of_int8_is_that_of_its_weights(int8: Checkpoint) -> None:
    parameters, features = linear_sizes(int8.config)
    info, quantized = int8.info, 7 * int8.config.num_hidden_layers
    assert info.linears == {"int8": quantized, "float32": 1}
    assert info.weight_bytes == parameters + 4 * features + other_bytes(int8)
    assert (info.dtype, info.threshold) == (torch.float32, 0.0)
    described = f"layers 1 in float32, {quantized} in int8, outlier threshold 0, activations not rounded; "
    assert described in info.describe()


def test_the_settings_override_threshold_dtype_and_length(folder: Path) -> None:
    assert load("int8", model=str(folder), int8_threshold="6").info.threshold == 6.0
    checkpoint = load("none", model=str(folder), dtype="bfloat16", max_model_len="99")
    assert (checkpoint.info.linears, checkpoint.info.dtype) == ({"bfloat16": 15}, torch.bfloat16)
    engine = engine_of(checkpoint, 1)
    assert (engine.plan.shape.dtype, engine.max_model_len) == (torch.bfloat16, 99)


def test_nf4_loads_and_generates(folder: Path) -> None:
    checkpoint = load("nf4", model=str(folder))
    assert checkpoint.info.linears == {"nf4": 14, "float32": 1}
    tokens = checkpoint.tokenizer.encode("def f")
    request = GenerationRequest(prompt="", prompt_tokens=tokens, max_tokens=6, min_tokens=6)
    found = completions(engine_of(checkpoint, 2), [request, request])
    assert [completion.num_output_tokens for completion in found] == [6, 6]


@pytest.mark.parametrize("quantization", ["int8", "checkpoint"])
def test_a_saved_8_bit_checkpoint_is_loaded_bit_for_bit(int8: Checkpoint, tmp_path: Path, quantization: str) -> None:
    int8.model.save_pretrained(tmp_path)
    int8.tokenizer.pretrained.save_pretrained(tmp_path)
    saved = load(quantization, model=str(tmp_path))
    assert saved.info == int8.info
    ids = torch.tensor([int8.tokenizer.encode("The with statement is used to wrap the execution of a block")])
    with torch.inference_mode():
        assert torch.equal(saved.model(input_ids=ids).logits, int8.model(input_ids=ids).logits)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_training_mode_and_gradients_are_off(precision: str, request: pytest.FixtureRequest) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(precision)
    assert not any(module.training for module in checkpoint.model.modules())
    assert not any(parameter.requires_grad for parameter in checkpoint.model.parameters())


@pytest.mark.parametrize("path", ["{}/absent", "./absent", "~/absent-checkpoint", "a/b/c"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path: Path, path: str) -> None:
    model = path.format(tmp_path)
    assert refusal(model) == f"model is {model!r}: no such folder"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"can't load {tmp_path}: ")


def test_a_model_other_than_a_llama_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.pretrained.save_pretrained(tmp_path)
    assert refusal(tmp_path) == f"{tmp_path} is a 'gpt2' checkpoint; this engine serves 'llama'"


def test_pickled_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    message = refusal(folder)
    assert message.startswith(f"can't load {folder}: ")
    assert "safetensors" in message


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_missing_weight_is_refused_by_name(folder: Path, quantization: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = refusal(folder, quantization)
    assert message.endswith("lacks 1 weights or has them in another shape, first model.layers.1.mlp.up_proj.weight")


def test_weights_of_another_shape_than_the_configs_are_refused(folder: Path) -> None:
    update_json(folder / "config.json", intermediate_size=256)
    assert "or has them in another shape, first model.layers.0.mlp.down_proj" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", "{", ""),
        ("tokenizer.json", "{}", ""),
        ("tokenizer.json", None, ""),
        ("generation_config.json", '{"temperature": ', "generation_config.json"),
    ],
)
def test_a_broken_or_missing_file_is_refused_in_one_line(
    folder: Path, file: str, content: str | None, named: str
) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    message = refusal(folder)
    assert str(folder) in message
    assert named in message


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_an_8_bit_checkpoint_is_not_served_in_another_precision(
    tokenizer: Tokenizer, tmp_path: Path, folder: Path, quantization: str
) -> None:
    eight_bit = tmp_path / "int8"
    load("int8", model=str(folder)).model.save_pretrained(eight_bit)
    tokenizer.pretrained.save_pretrained(eight_bit)
    assert refusal(eight_bit, quantization) == (
        f"quantization is {quantization!r}, but {eight_bit} is saved in int8; "
        "set quantization to 'checkpoint' to serve it as it is"
    )


def test_max_model_len_is_bounded_by_the_models_positions(folder: Path) -> None:
    assert load("none", model=str(folder), max_model_len="128").max_model_len == 128
    assert refusal(folder, max_model_len="129") == f"max_model_len is 129; {folder} has 128 positions"


def test_a_generation_config_outside_the_contract_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 1.5}))
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: top_p is 1\.5; it must be in \(0, 1\]$"):
        engine_of(load("none", model=str(folder)), 1)


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
    update_json(folder / "config.json", auto_map=auto_map, model_type=model_type)
    update_json(folder / "tokenizer_config.json", auto_map=auto_map)
    if model_type == "llama":
        assert load("none", model=str(folder)).config.model_type == "llama"
    else:
        assert refusal(folder).startswith(f"can't load {folder}: ")
    assert not evidence.exists()
