"""What a server does with a prepared checkpoint that isn't what its manifest says: refuses it, in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from engine.engines import load
from engine.small_checkpoints import save_small
from llama_engine.errors import CheckpointError
from llama_engine.model.manifest import MANIFEST, Manifest
from llama_engine.text.tokenizer import Tokenizer
from unit.prepared import prepare_folder


@pytest.fixture(scope="module")
def whole(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    prepare_folder(save_small(folder / "original", tokenizer), folder / "small-int8")
    return folder / "small-int8"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    return shutil.copytree(whole, tmp_path / "copy")


def _refused(folder: Path, quantization: str = "int8", **parameters: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(quantization, model=str(folder), **parameters)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_file_that_was_copied_in_part_is_served(folder: Path) -> None:
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    assert _refused(folder) == f"{weights} has {size - 1} bytes; when it was prepared it had {size}"


def test_a_file_that_is_missing_is_done_without(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    message = _refused(folder)
    assert message.startswith(f"{folder / 'generation_config.json'} can't be read, and the manifest lists it: ")


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_8_bit_weights_are_served_in_another_precision(folder: Path, quantization: str) -> None:
    assert _refused(folder, quantization) == (
        f"quantization is {quantization!r}, but {folder} is saved in int8; "
        "set quantization to 'checkpoint' to serve it as it is"
    )


def test_another_revision_is_asked_for_and_this_one_served(folder: Path) -> None:
    manifest = Manifest.read(folder)
    assert manifest is not None
    assert load("int8", model=str(folder), revision=manifest.source.revision).prepared == manifest
    assert _refused(folder, revision="v2") == (
        f"revision is 'v2', but the checkpoint was prepared from the folder original "
        f"revision {manifest.source.revision}"
    )


@pytest.mark.parametrize("text", ["", '{"kind": ', "\x80"])
def test_a_manifest_that_cannot_be_read_is_passed_over(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))
    assert _refused(folder).startswith(f"{folder / MANIFEST} can't be read: ")


def test_a_manifest_of_a_later_program_is_read_as_one_of_this(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**content, "format": 2}))
    assert _refused(folder) == f"{folder / MANIFEST} is of format 2; this program reads 1"


@pytest.mark.parametrize("part", ["source", "files", "settings", "versions", "date"])
def test_a_manifest_without_a_part_is_taken_for_a_whole_one(folder: Path, part: str) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    del content[part]
    (folder / MANIFEST).write_text(json.dumps(content))
    assert _refused(folder).startswith(f"{folder / MANIFEST} isn't a whole manifest: ")


@pytest.mark.parametrize("text", ["[]", '{"version": 3}', '{"kind": "of another tool", "files": {}}'])
def test_a_manifest_of_another_tool_is_taken_for_ours(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    assert Manifest.read(folder) is None
    assert load("int8", model=str(folder)).prepared is None
