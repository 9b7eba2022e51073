"""A checkpoint's file that is unreadable or incomplete is refused by name and reason, in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from engine.checkpoints import save_small
from engine.engines import load
from llama_engine.checkpoint.files import check_files
from llama_engine.errors import CheckpointError
from llama_engine.text.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return save_small(tmp_path_factory.mktemp("saved"), tokenizer)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


@pytest.fixture
def in_two_files(folder: Path) -> Path:
    """A checkpoint with its weights in two files, both complete."""
    tensors = load_file(folder / WEIGHTS)
    half = len(tensors) // 2
    save_file(dict([*tensors.items()][:half]), folder / FIRST)
    save_file(dict([*tensors.items()][half:]), folder / SECOND)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": SECOND, "b": FIRST, "c": SECOND}}))
    return folder


def _refusal(folder: Path) -> str:
    """Return the reason without the folder. The files are checked before anything is loaded."""
    with pytest.raises(CheckpointError) as refused:
        load("none", model=str(folder))
    start, message = f"can't load {folder}: ", str(refused.value)
    assert "\n" not in message
    assert message.startswith(start)
    return message.removeprefix(start)


def _replace(path: Path, content: bytes | int | None) -> None:
    """Write a file's content, cut it to a number of bytes, or put a folder in its place."""
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)


def test_other_files_of_a_checkpoint_are_ignored(in_two_files: Path) -> None:
    (in_two_files / "notes.txt").write_text("not one of its files")
    (in_two_files / "adapter.safetensors").write_text("nor this one")
    check_files(in_two_files)
    # A hub id is not looked up on disk.
    check_files(Path("organisation/name"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (-1, "; its header says "),
        (100, "it has 100 bytes and no whole header"),
        (3, "it has 3 bytes and no whole header"),
        (b"PK\x03\x04" * 99, "it has 396 bytes and no whole header"),
        (b"\x02" + bytes(7) + b"{", "it has 9 bytes and no whole header"),
        (b"\x02" + bytes(7) + b"[]", "its header is not valid safetensors"),
        (b"\xff" * 7 + b"\x7f{}", "it has 10 bytes and no whole header"),
        (b"\x08" + bytes(7) + b'{"a": 1}', "its header is not valid safetensors"),
        (b"\x02" + bytes(7) + b"{[", "its header is not valid safetensors"),
        (b"\x02" + bytes(7) + b"{}!", "it has 11 bytes; its header says 10"),
        (None, "Is a directory"),
    ],
)
def test_incomplete_weights_are_refused_by_name(folder: Path, content: bytes | int | None, reason: str) -> None:
    _replace(folder / WEIGHTS, content)
    message = _refusal(folder)
    assert message.startswith(f"{WEIGHTS}: ")
    assert reason in message


ENTRY: dict[str, object] = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}


def _with_header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + bytes(8)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": []}, "dtype of 'a' is None"),
        ({"a": {**ENTRY, "dtype": 4}}, "dtype of 'a' is 4"),
        *(({"a": {**ENTRY, "shape": shape}}, f"shape of 'a' is {shape}")
          for shape in (2, None, [2, -1], [2.0, 1], [True, 2], ["2"], [2**64, 1], [1] * 9)),
        ({"a": {**ENTRY, "shape": [2**40, 2**40]}}, f"a is F32 of shape [{2**40}, {2**40}], and has 8 bytes"),
        ({"a": {**ENTRY, "dtype": "F16"}}, "a is F16 of shape [2, 1], and has 8 bytes"),
        *(({"a": {**ENTRY, "data_offsets": offsets}}, f"data_offsets of 'a' are {offsets}")
          for offsets in (None, 8, [8], [0, 4, 8], [-8, 0], [8, 0], [0, 8.0], [False, 8])),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, "a doesn't begin where another one ends"),
        ({"a": ENTRY, "b": ENTRY}, "b doesn't begin where another one ends"),
        ({"a\n": ENTRY}, "'a\\n' is no name of a tensor"),
        ({"\ud800": ENTRY}, "'\\ud800' is no name of a tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_header_is_refused_by_tensor_and_field(folder: Path, header: object, reason: str) -> None:
    (folder / WEIGHTS).write_bytes(_with_header(json.dumps(header)))
    assert _refusal(folder) == f"{WEIGHTS}: its header is not valid safetensors: {reason}"


def test_a_header_with_a_tensor_twice_is_refused(folder: Path) -> None:
    entry = json.dumps(ENTRY)
    (folder / WEIGHTS).write_bytes(_with_header(f'{{"a": {entry}, "a": {entry}}}'))
    assert _refusal(folder).endswith("it has 'a' twice")


def test_a_header_of_too_many_levels_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(_with_header('{"a": ' + "[" * 100_000))
    assert "its header is not valid safetensors: maximum recursion depth" in _refusal(folder)


def test_a_tensor_in_two_files_is_refused(in_two_files: Path) -> None:
    shutil.copy(in_two_files / FIRST, in_two_files / SECOND)
    message = _refusal(in_two_files)
    assert message.startswith(f"{SECOND}: it has the tensor ")
    assert message.endswith(f", which {FIRST} has, too")


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "a/b.safetensors", "x.bin", ".."])
def test_an_index_that_points_elsewhere_is_refused(in_two_files: Path, name: str) -> None:
    (in_two_files / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": name}}))
    assert _refusal(in_two_files) == (
        f"{INDEX}: its weight_map has {name!r}, which is no name of a safetensors file beside it"
    )


def test_a_linked_file_is_read(in_two_files: Path, tmp_path: Path) -> None:
    """The cache of the hub consists of links to other folders."""
    (in_two_files / FIRST).rename(tmp_path / "blob")
    (in_two_files / FIRST).symlink_to(tmp_path / "blob")
    check_files(in_two_files)


@pytest.mark.parametrize("name", ["config.json", "merges.txt", WEIGHTS])
def test_a_pipe_is_refused(folder: Path, name: str) -> None:
    """Reading it would wait."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert _refusal(folder) == f"{name}: it is neither a file nor a folder"


def test_a_json_file_of_gigabytes_is_refused(folder: Path) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)
    assert _refusal(folder) == f"tokenizer.json: it has {1 << 40} bytes; a JSON file has at most 100000000"


def test_a_missing_or_incomplete_file_of_the_index_is_refused_by_name(in_two_files: Path) -> None:
    _replace(in_two_files / SECOND, -1)
    assert _refusal(in_two_files).startswith(f"{SECOND}: it has ")
    (in_two_files / FIRST).unlink()
    assert _refusal(in_two_files) == f"{FIRST}: No such file or directory"


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_files_is_refused(in_two_files: Path, content: str) -> None:
    (in_two_files / INDEX).write_text(content)
    assert _refusal(in_two_files) == f"{INDEX}: it has no weight_map from weights to files"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *[(content, "it is not valid JSON: ") for content in (b'{"cut": ', b"", b"\xff\xfe\x00")],
        (b"[]", "it is not a JSON object"),
        (None, "Is a directory"),
    ],
)
def test_unreadable_json_is_refused_by_name(folder: Path, content: bytes | None, reason: str) -> None:
    # In the opposite order of the check, which names the first one.
    for name in ("tokenizer_config.json", "tokenizer.json", "generation_config.json", "config.json"):
        _replace(folder / name, content)
        assert _refusal(folder).startswith(f"{name}: {reason}")
