"""A checkpoint's file that is unreadable or incomplete is refused by name and reason, in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from engine.checkpoints import save_small
from engine.engines import load
from llama_engine.errors import CheckpointError
from llama_engine.model.checkpoint_files import check_files
from llama_engine.text.tokenizer import Tokenizer

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
    shutil.copy(folder / WEIGHTS, folder / FIRST)
    (folder / WEIGHTS).rename(folder / SECOND)
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
