"""Which files of a source are used, and how an unsuitable one is refused, before its weights are read, in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from programs.prepare.conftest import INDEX, WEIGHTS
from safetensors.torch import save_file
from triton_prepare.prepare import prepare
from triton_prepare.progress import PrepareError
from triton_prepare.quantize import saved_dtype
from triton_prepare.source import choose_files

LLAMA = json.dumps({"model_type": "llama"})
QUANTIZED = json.dumps({"model_type": "llama", "quantization_config": {"load_in_8bit": True}})
NEEDED = "weights in safetensors are needed, as pickles can run code"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SHARDED = json.dumps({"weight_map": {"a": SHARDS[1], "b": SHARDS[0], "c": SHARDS[0]}})


def _folder(folder: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_only_files_that_are_loaded_or_kept_are_chosen(tmp_path: Path) -> None:
    copied = ["LICENSE.txt", "NOTICE", "chat_template.jinja"]
    copied += ["generation_config.json", "tokenizer.json", "tokenizer.model"]
    others = [
        *("pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors", "original/params.json", INDEX),
        *("original/LICENSE", "modeling_x.py", "README.md", "manifest.json", "adapter_config.json"),
    ]
    folder = _folder(tmp_path, dict.fromkeys([*copied, *others, WEIGHTS], "") | {"config.json": LLAMA})
    assert choose_files("x", folder) == (["config.json", WEIGHTS], copied)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"x": ""}, " has no config.json: it is no checkpoint"),
        ({"config.json": "{"}, ": config.json is not a JSON object: "),
        ({"config.json": "[]"}, ": config.json is not a JSON object"),
        ({"config.json": '{"model_type": "gpt2"}'}, " is a 'gpt2' checkpoint; this project serves llama, "),
        ({"config.json": LLAMA, "pytorch_model.bin": ""}, f" has no {WEIGHTS}: {NEEDED}"),
        ({"config.json": LLAMA, INDEX: SHARDED, SHARDS[0]: ""}, f" lacks 1 of 2 files of weights, first {SHARDS[1]}"),
        ({"config.json": LLAMA, INDEX: "{}"}, f": {INDEX} has no weight_map"),
    ],
)
def test_an_unsuitable_checkpoint_is_refused(tmp_path: Path, contents: dict[str, str], message: str) -> None:
    folder = _folder(tmp_path / "unsuitable", contents)
    with pytest.raises(PrepareError) as refused:
        prepare(str(folder), None, tmp_path / "out")
    assert str(refused.value).startswith(f"{folder}{message}")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out.part").exists()


HALF = torch.zeros(4, 4).half()


@pytest.mark.parametrize(
    ("tensors", "dtype"),
    [
        ({"a.weight": HALF, "b.bias": torch.zeros(4).half()}, "float16"),
        ({"a.weight": HALF.bfloat16()}, "bfloat16"),
        # A table of rotary frequencies isn't a weight.
        ({"a.weight": HALF, "rotary_emb.inv_freq": torch.zeros(4)}, "float16"),
        # float32 holds the values of both.
        ({"a.weight": HALF, "b.weight": HALF.bfloat16()}, "float32"),
    ],
)
def test_the_dtype_holds_every_saved_weight(tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: str) -> None:
    save_file(tensors, tmp_path / WEIGHTS)
    assert saved_dtype("x", tmp_path) == dtype


def _file(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()


UNREADABLE = "x: the weights can't be read: "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, UNREADABLE) for content in (b"", b"\xff" * 64, _file("notjson!"), _file("[]"))),
        (_file('{"a.weight": {"data_offsets": [0, 0]}}'), UNREADABLE),
        (_file("{}"), "x has weights in no dtype at all; F32, F16, BF16 can be quantized"),
        (
            _file('{"a.weight": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}') + bytes(8),
            "x has weights in F64; F32, F16, BF16 can be quantized",
        ),
    ],
)
def test_weights_that_cannot_be_read_or_quantized_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(PrepareError) as refused:
        saved_dtype("x", tmp_path)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_folder_is_known_by_the_content_of_its_files(original: Path, finished: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(original, tmp_path / "elsewhere"))
    (copy / "README.md").write_text("not loaded")
    assert prepare(str(copy), None, finished).source.model == "small"
    with pytest.raises(PrepareError, match=r"^revision is 'v2', but .* is a folder: only a hub id has revisions$"):
        prepare(str(copy), "v2", finished)
