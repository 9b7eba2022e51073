"""A checkpoint's file that is unreadable or incomplete is refused by name and reason, in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from engine.engines import load
from engine.small_checkpoints import save_small
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
    """The same checkpoint with its weights in two files."""
    whole = folder / WEIGHTS
    names = [name for name in header(whole) if name != "__metadata__"]
    shutil.copy(whole, folder / FIRST)
    whole.rename(folder / SECOND)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, SECOND) | {"x": FIRST}}))
    return folder


def header(weights: Path) -> dict[str, object]:
    content = weights.read_bytes()
    header: dict[str, object] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def refusal(folder: Path) -> str:
    """Return the reason without the folder."""
    with pytest.raises(CheckpointError) as refused:
        check_files(folder)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(f"can't load {folder}: ")
    return message.removeprefix(f"can't load {folder}: ")


def cut(path: Path, end: int | None) -> None:
    path.write_bytes(path.read_bytes()[:end])


def turn_into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def write(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)

    return write


def test_a_complete_checkpoint_passes_and_other_files_are_ignored(folder: Path) -> None:
    check_files(folder)
    (folder / "notes.txt").write_text("not one of its files")
    (folder / "adapter.safetensors").write_text("nor this one")
    check_files(folder)


def test_a_hub_id_is_not_looked_up_on_disk() -> None:
    check_files(Path("organisation/name"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: cut(path, -1), "; its header says "),
        (lambda path: path.write_bytes(path.read_bytes() + b"!"), "; its header says "),
        (lambda path: cut(path, 100), "it has 100 bytes and no whole header"),
        (lambda path: cut(path, 3), "it has 3 bytes and no whole header"),
        (lambda path: cut(path, 0), "it has 0 bytes and no whole header"),
        (lambda path: path.write_bytes(b"PK\x03\x04" * 99), "it has 396 bytes and no whole header"),
        (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"{"), "it has 9 bytes and no whole header"),
        (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"[]"), "its header is not valid safetensors"),
        (lambda path: path.write_bytes(b"\x08" + bytes(7) + b'{"a": 1}'), "its header is not valid safetensors"),
        (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"{["), "its header is not valid safetensors"),
        (turn_into_a_folder, "Is a directory"),
    ],
    ids=[
        *("byte-less", "byte-more", "in-header", "in-length", "empty", "zip", "1-of-2", "list", "number", "no-json"),
        "dir",
    ],
)
@pytest.mark.parametrize("files", ["one", "two"])
def test_incomplete_weights_are_refused_by_name(
    files: str, damage: Callable[[Path], None], reason: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue("folder" if files == "one" else "in_two_files")
    name = WEIGHTS if files == "one" else SECOND
    damage(folder / name)
    message = refusal(folder)
    assert message.startswith(f"{name}: ")
    assert reason in message


def test_a_missing_file_of_the_index_is_refused_by_name(in_two_files: Path) -> None:
    check_files(in_two_files)
    (in_two_files / FIRST).unlink()
    assert refusal(in_two_files) == f"{FIRST}: No such file or directory"


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_files_is_refused(in_two_files: Path, content: str) -> None:
    (in_two_files / INDEX).write_text(content)
    assert refusal(in_two_files) == f"{INDEX}: it has no weight_map from weights to files"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (write('{"cut": '), "it is not valid JSON: "),
        (write(""), "it is not valid JSON: "),
        (write("[]"), "it is not a JSON object"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "it is not valid JSON: "),
        (turn_into_a_folder, "Is a directory"),
    ],
    ids=["cut", "empty", "list", "bytes", "dir"],
)
def test_unreadable_json_is_refused_by_name(
    folder: Path, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    damage(folder / name)
    assert refusal(folder).startswith(f"{name}: {reason}")


def test_the_files_are_checked_before_a_checkpoint_is_loaded(folder: Path) -> None:
    cut(folder / WEIGHTS, -1)
    with pytest.raises(CheckpointError, match=rf"^can't load {folder}: {WEIGHTS}: it has \d+ bytes; its header says "):
        load("none", model=str(folder))
