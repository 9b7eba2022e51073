"""What can't be prepared is found out before anything large is read, and said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine.small_checkpoints import save_small
from llama_engine.text.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file
from triton_prepare.checkpoint_files import find_files
from triton_prepare.errors import SourceError
from triton_prepare.hub import Hub
from triton_prepare.run import Order, prepare
from triton_prepare.weights import read_weights
from unit.prepared import NOWHERE, prepare_folder, save_small_in

LLAMA = json.dumps({"model_type": "llama"})
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def _refused(contents: dict[str, str]) -> str:
    with pytest.raises(SourceError) as refused:
        find_files("x", contents, contents.__getitem__)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_only_the_files_that_are_used_are_read_or_taken_over() -> None:
    names = [
        "tokenizer.json",
        "tokenizer.model",
        "LICENSE.txt",
        "NOTICE",
        "generation_config.json",
        "chat_template.jinja",
    ]
    others = [
        "pytorch_model.bin",
        "consolidated.00.pth",
        "consolidated.safetensors",
        "original/params.json",
        "original/LICENSE",
        "modeling_x.py",
        "README.md",
        "manifest.json",
        "adapter_config.json",
        INDEX,
    ]
    contents = dict.fromkeys([*names, *others, WEIGHTS], "") | {"config.json": LLAMA}
    found = find_files("x", contents, contents.__getitem__)
    assert (found.config, found.weights, sorted(found.kept)) == (("config.json",), (WEIGHTS,), sorted(names))


def test_the_files_of_an_index_are_the_weights() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.dumps({"weight_map": {"a": shards[1], "b": shards[0], "c": shards[0]}})
    contents = {"config.json": LLAMA, INDEX: index, **dict.fromkeys(shards, "")}
    found = find_files("x", contents, contents.__getitem__)
    assert (found.config, found.weights) == (("config.json", INDEX), tuple(shards))
    del contents[shards[1]]
    assert _refused(contents) == f"x lacks 1 of 2 files of weights, first {shards[1]}"
    assert _refused({**contents, INDEX: "{}"}) == f"x: {INDEX} has no weight_map"


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ({}, "x has no config.json: it is no checkpoint"),
        ({"config.json": "{"}, "x: config.json is not JSON: "),
        ({"config.json": "[]"}, "x: config.json is not a JSON object"),
        ({"config.json": '{"model_type": "gpt2"}'}, "x is a 'gpt2' checkpoint; this project serves 'llama'"),
        (
            {"config.json": json.dumps({"model_type": "llama", "quantization_config": {"load_in_8bit": True}})},
            "x is quantized already: there is nothing to prepare",
        ),
        (
            {"config.json": LLAMA, "pytorch_model.bin": "", "tokenizer.json": ""},
            "x has its weights in pickles only (pytorch_model.bin), which can run code; safetensors are needed",
        ),
        ({"config.json": LLAMA}, f"x has no weights in safetensors: neither {WEIGHTS} nor {INDEX}"),
    ],
)
def test_what_cannot_be_prepared_is_tried(contents: dict[str, str], said: str) -> None:
    assert _refused(contents).startswith(said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_size_in_8_bits_is_guessed(dtype: torch.dtype, tokenizer: Tokenizer, tmp_path: Path) -> None:
    original = save_small_in(dtype, tmp_path / "original", tokenizer)
    found = read_weights("x", original)
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert found.bytes == sum(tensor.nbytes for tensor in load_file(original / WEIGHTS).values())
    prepare_folder(original, tmp_path / "out")
    assert found.int8_bytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / WEIGHTS).values())


def _saved(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def test_a_table_of_rotary_frequencies_decides_the_dtype(tmp_path: Path) -> None:
    half, table = torch.zeros(4, 4).half(), torch.zeros(4)
    assert read_weights("x", _saved(tmp_path, a__weight=half, rotary_emb__inv_freq=table)).dtype == "float16"
    # Of two dtypes neither may lose anything.
    assert read_weights("x", _saved(tmp_path, a__weight=half, b__weight=half.bfloat16())).dtype == "float32"


def test_a_dtype_that_cannot_be_quantized_is_quantized(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"^x has weights in F64; F32, F16, BF16 can be quantized$"):
        read_weights("x", _saved(tmp_path, a__weight=torch.zeros(4, 4).double()))


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0notjson!", b"\x02\0\0\0\0\0\0\0[]"])
def test_broken_weights_end_in_a_traceback(content: bytes, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(SourceError, match=r"^x: the weights can't be read: ") as refused:
        read_weights("x", tmp_path)
    assert "\n" not in str(refused.value)


def test_a_revision_of_a_folder_is_passed_over(tokenizer: Tokenizer, tmp_path: Path) -> None:
    order = Order(str(save_small(tmp_path / "small", tokenizer)), "v2", tmp_path / "out")
    with pytest.raises(SourceError, match=r"revision is 'v2', but .* is a folder"):
        prepare(order, Hub(NOWHERE, tmp_path))
