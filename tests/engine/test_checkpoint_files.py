"""A file of a checkpoint that can't be read, or isn't whole, is named in one line with the reason."""

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
    """The same checkpoint as if it had been saved in two files."""
    whole = folder / WEIGHTS
    names = [name for name in _header(whole) if name != "__metadata__"]
    shutil.copy(whole, folder / FIRST)
    whole.rename(folder / SECOND)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, SECOND) | {"x": FIRST}}))
    return folder


def _header(weights: Path) -> dict[str, object]:
    content = weights.read_bytes()
    header: dict[str, object] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def _refused(folder: Path) -> str:
    """Return why it isn't loaded, without where it lies."""
    with pytest.raises(CheckpointError) as refused:
        check_files(folder)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(f"can't load {folder}: ")
    return message.removeprefix(f"can't load {folder}: ")


def _cut(path: Path, end: int | None) -> None:
    path.write_bytes(path.read_bytes()[:end])


def _turn_into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _write(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)

    return write


def test_a_whole_checkpoint_is_refused(folder: Path) -> None:
    check_files(folder)
    (folder / "notes.txt").write_text("not one of its files")
    (folder / "adapter.safetensors").write_text("nor this one")
    check_files(folder)


def test_a_name_on_the_hub_is_looked_for_on_disk() -> None:
    check_files(Path("organisation/name"))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda path: _cut(path, -1), "; its header says "),
        (lambda path: path.write_bytes(path.read_bytes() + b"!"), "; its header says "),
        (lambda path: _cut(path, 100), "it has 100 bytes and no whole header"),
        (lambda path: _cut(path, 3), "it has 3 bytes and no whole header"),
        (lambda path: _cut(path, 0), "it has 0 bytes and no whole header"),
        (lambda path: path.write_bytes(b"PK\x03\x04" * 99), "it has 396 bytes and no whole header"),
        (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"{"), "it has 9 bytes and no whole header"),
        (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"[]"), "its header is not valid safetensors"),
        (lambda path: path.write_bytes(b"\x08" + bytes(7) + b'{"a": 1}'), "its header is not valid safetensors"),
        (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"{["), "its header is not valid safetensors"),
        (_turn_into_a_folder, "Is a directory"),
    ],
    ids=[
        "byte-less",
        "byte-more",
        "in-header",
        "in-length",
        "empty",
        "zip",
        "1-of-2",
        "list",
        "number",
        "no-json",
        "dir",
    ],
)
@pytest.mark.parametrize("files", ["one", "two"])
def test_weights_that_are_not_whole_are_loaded_or_not_named(
    files: str, break_it: Callable[[Path], None], said: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue("folder" if files == "one" else "in_two_files")
    name = WEIGHTS if files == "one" else SECOND
    break_it(folder / name)
    reason = _refused(folder)
    assert reason.startswith(f"{name}: ")
    assert said in reason


def test_a_file_that_the_index_names_and_that_is_not_there_is_not_named(in_two_files: Path) -> None:
    check_files(in_two_files)
    (in_two_files / FIRST).unlink()
    assert _refused(in_two_files) == f"{FIRST}: No such file or directory"


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_names_no_files_is_passed_over(in_two_files: Path, content: str) -> None:
    (in_two_files / INDEX).write_text(content)
    assert _refused(in_two_files) == f"{INDEX}: it has no weight_map from weights to files"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_write('{"cut": '), "it is not valid JSON: "),
        (_write(""), "it is not valid JSON: "),
        (_write("[]"), "it is not a JSON object"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "it is not valid JSON: "),
        (_turn_into_a_folder, "Is a directory"),
    ],
    ids=["cut", "empty", "list", "bytes", "dir"],
)
def test_a_description_that_cannot_be_read_is_passed_over_or_not_named(
    folder: Path, name: str, break_it: Callable[[Path], None], said: str
) -> None:
    break_it(folder / name)
    assert _refused(folder).startswith(f"{name}: {said}")


def test_a_checkpoint_is_loaded_without_looking_at_its_files_first(folder: Path) -> None:
    _cut(folder / WEIGHTS, -1)
    with pytest.raises(CheckpointError, match=rf"^can't load {folder}: {WEIGHTS}: it has \d+ bytes; its header says "):
        load("none", model=str(folder))


def test_weights_of_another_shape_are_served(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    with pytest.raises(CheckpointError, match=r"or has them in another shape, first model\.layers\.0\.mlp\.down_proj"):
        load("none", model=str(folder))
