"""Checkpoints that can't be served: each is refused in one line that says why."""

import json
from pathlib import Path

import pytest
import torch
from engine.engines import engine_of, load
from engine.small_checkpoints import save_small
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import choose_device
from llama_engine.text.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return save_small(tmp_path / "small", tokenizer)


def _refused(quantization: str, **parameters: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(quantization, **parameters)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("path", ["{}/absent", "./absent", "~/absent-checkpoint", "a/b/c"])
def test_a_missing_folder_is_looked_up_on_the_hub(tmp_path: Path, path: str) -> None:
    model = path.format(tmp_path)
    assert _refused("none", model=model) == f"model is {model!r}: no such folder"


def test_an_empty_folder_is_served(tmp_path: Path) -> None:
    assert _refused("none", model=str(tmp_path)).startswith(f"can't load {tmp_path}: ")


def test_a_model_that_is_no_llama_is_served(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.pretrained.save_pretrained(tmp_path)
    message = _refused("none", model=str(tmp_path))
    assert message == f"{tmp_path} is a 'gpt2' checkpoint; this engine serves 'llama'"


def test_pickled_weights_are_unpickled(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    message = _refused("none", model=str(folder))
    assert message.startswith(f"can't load {folder}: ")
    assert "safetensors" in message


def test_broken_weights_are_served(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert _refused("none", model=str(folder)).startswith(f"can't load {folder}: ")


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_missing_weight_is_served_as_random_numbers(folder: Path, quantization: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = _refused(quantization, model=str(folder))
    assert message.endswith("lacks 1 weights or has them in another shape, first model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize(("file", "text"), [("config.json", "{"), ("tokenizer.json", "{}")])
def test_a_broken_file_ends_in_a_traceback(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text)
    assert str(folder) in _refused("none", model=str(folder))


def test_a_generation_config_that_cannot_be_read_is_passed_over(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": ')
    assert "generation_config.json" in _refused("none", model=str(folder))


def test_a_checkpoint_without_its_tokenizer_is_served(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert str(folder) in _refused("none", model=str(folder))


@pytest.mark.parametrize("asked", ["none", "nf4"])
def test_an_8_bit_checkpoint_is_served_in_another_precision(
    tokenizer: Tokenizer, tmp_path: Path, folder: Path, asked: str
) -> None:
    eight_bit = tmp_path / "int8"
    load("int8", model=str(folder)).model.save_pretrained(eight_bit)
    tokenizer.pretrained.save_pretrained(eight_bit)
    assert _refused(asked, model=str(eight_bit)) == (
        f"quantization is {asked!r}, but {eight_bit} is saved in int8; "
        "set quantization to 'checkpoint' to serve it as it is"
    )


def test_more_positions_than_the_model_has_are_served(folder: Path) -> None:
    assert load("none", model=str(folder), max_model_len="128").max_model_len == 128
    message = _refused("none", model=str(folder), max_model_len="129")
    assert message == f"max_model_len is 129; {folder} has 128 positions"


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [("top_p", 1.5, "in (0, 1]"), ("temperature", 9.0, "from 0 to 2"), ("top_k", -3, "at least 0")],
)
def test_a_generation_config_out_of_the_contract_is_served(folder: Path, name: str, value: float, bound: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, name: value}))
    with pytest.raises(CheckpointError) as refused:
        engine_of(load("none", model=str(folder)), 1)
    assert str(refused.value) == f"generation_config.json: {name} is {value}; it must be {bound}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_replaced_by_the_cpu() -> None:
    assert choose_device("auto", None) == choose_device("cpu", None) == choose_device("cpu", 3) == torch.device("cpu")
    for setting, gpu in (("cuda", None), ("cuda", 0), ("auto", 0)):
        with pytest.raises(CheckpointError, match=f"device is '{setting}' .*PyTorch sees no GPU"):
            choose_device(setting, gpu)
