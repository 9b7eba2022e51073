"""A checkpoint's file that is unreadable or incomplete is refused by name and reason, in one line."""

import json
import os
import shutil
from pathlib import Path

import pytest
from engine.engines import load
from llama_engine.checkpoint.files import check_files
from llama_engine.errors import CheckpointError
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


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


def _refusal(model: Path) -> str:
    """Return the reason without the folder. The files are checked before anything is loaded."""
    with pytest.raises(CheckpointError) as refused:
        load("none", model=str(model))
    start, message = f"can't load {model}: ", str(refused.value)
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


def test_other_files_of_a_checkpoint_are_ignored(in_two_files: Path, tmp_path: Path) -> None:
    (in_two_files / "notes.txt").write_text("not one of its files")
    (in_two_files / "adapter.safetensors").write_text("nor this one")
    # The cache of the hub consists of links to other folders.
    (in_two_files / FIRST).rename(tmp_path / "blob")
    (in_two_files / FIRST).symlink_to(tmp_path / "blob")
    check_files(in_two_files)
    # A hub id is not looked up on disk.
    check_files(Path("organisation/name"))


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert _refusal(folder).startswith("it has pytorch_model.bin and no safetensors; ")


def test_shards_without_an_index_are_refused_by_name(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / FIRST)
    lists = "which lists the files of the weights; download that, too"
    assert _refusal(folder) == f"it has {FIRST} and no {INDEX}, {lists}"


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "it.gguf"])
def test_a_git_lfs_pointer_is_named_as_one(folder: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 98362432\n"
    (folder / name).write_text(pointer)
    refusal = _refusal(folder / name if name.endswith("gguf") else folder)
    assert "it is a Git LFS pointer and not the file itself; run `git lfs pull`" in refusal


PANIC = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
NO_TOKENIZER = "it has no tokenizer.json; save the tokenizer as a fast one first (ValueError: Couldn't instantiate the "


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", "{}", "config.json: ValueError: Unrecognized model"),
        ("config.json", None, "it has no config.json"),
        ("generation_config.json", {"max_new_tokens": -1}, "generation_config.json: ValueError: "),
        ("tokenizer.json", "{}", "tokenizer.json or tokenizer_config.json: KeyError: "),
        ("tokenizer.json", None, NO_TOKENIZER),
        # Its code panics.
        ("tokenizer.json", PANIC, "tokenizer.json or tokenizer_config.json: PanicException: "),
    ],
)
def test_a_missing_or_unusable_file_is_refused_by_name(
    folder: Path, name: str, content: str | dict[str, object] | None, reason: str
) -> None:
    path = folder / name
    before = json.loads(path.read_text())
    if content is None:
        path.unlink()
    else:
        path.write_text(content if isinstance(content, str) else json.dumps({**before, **content}))
    assert _refusal(folder).startswith(reason)


ENTRY: dict[str, object] = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}
TWICE = f'{{"a": {json.dumps(ENTRY)}, "a": {json.dumps(ENTRY)}}}'
INVALID = "its header is not valid safetensors: "


def _with_header(header: object) -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    return len(text).to_bytes(8, "little") + text.encode() + bytes(8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (-1, "it has "),
        (b"PK\x03\x04" * 99, "it has 396 bytes and no whole header"),
        (b"\x02" + bytes(7) + b"{}!", "it has 11 bytes; its header says 10"),
        (None, "Is a directory"),
        (_with_header("[]"), "its header is not valid safetensors"),
        (_with_header({"a": []}), f"{INVALID}dtype of 'a' is None"),
        *((_with_header({"a": {**ENTRY, "shape": shape}}), f"{INVALID}shape of 'a' is {shape}")
          for shape in (2, [2, -1], [2**64, 1], [1] * 9)),
        (_with_header({"a": {**ENTRY, "shape": [2**40, 2**40]}}), f"{INVALID}a is F32 of shape [{2**40}, "),
        *((_with_header({"a": {**ENTRY, "data_offsets": offsets}}), f"{INVALID}data_offsets of 'a' are {offsets}")
          for offsets in ([8], [-8, 0], [8, 0])),
        (_with_header({"a": ENTRY, "b": ENTRY}), f"{INVALID}b doesn't begin where another one ends"),
        (_with_header({"a\n": ENTRY}), f"{INVALID}'a\\n' is no name of a tensor"),
        (_with_header(TWICE), f"{INVALID}it has 'a' twice"),
        (_with_header('{"a": ' + "[" * 100_000), f"{INVALID}maximum recursion depth"),
    ],
)  # fmt: skip
def test_invalid_weights_are_refused_by_name(folder: Path, content: bytes | int | None, reason: str) -> None:
    _replace(folder / WEIGHTS, content)
    assert _refusal(folder).startswith(f"{WEIGHTS}: {reason}")


def test_a_tensor_in_two_files_is_refused(in_two_files: Path) -> None:
    shutil.copy(in_two_files / FIRST, in_two_files / SECOND)
    message = _refusal(in_two_files)
    assert message.startswith(f"{SECOND}: it has the tensor ")
    assert message.endswith(f", which {FIRST} has, too")


NO_NAME = "its weight_map has {!r}, which is no name of a safetensors file beside it"
NO_MAP = "it has no weight_map from weights to files"


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        *(({"weight_map": {"a": FIRST, "b": name}}, NO_NAME.format(name))
          for name in ("../model.safetensors", "x.bin", "..")),
        ([], "it is not a JSON object"), ({"weight_map": []}, NO_MAP), ({"weight_map": {"a": 1}}, NO_MAP),
    ],
)  # fmt: skip
def test_an_index_without_files_beside_it_is_refused(in_two_files: Path, index: object, reason: str) -> None:
    (in_two_files / INDEX).write_text(json.dumps(index))
    assert _refusal(in_two_files) == f"{INDEX}: {reason}"


def test_a_pipe_is_refused(folder: Path) -> None:
    """Reading it would wait."""
    os.mkfifo(folder / "merges.txt")
    assert _refusal(folder) == "merges.txt: it is neither a file nor a folder"


def test_a_json_file_of_gigabytes_is_refused(folder: Path) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)
    assert _refusal(folder) == f"tokenizer.json: it has {1 << 40} bytes; a JSON file has at most 100000000"


def test_a_missing_or_incomplete_file_of_the_index_is_refused_by_name(in_two_files: Path) -> None:
    _replace(in_two_files / SECOND, -1)
    assert _refusal(in_two_files).startswith(f"{SECOND}: it has ")
    (in_two_files / FIRST).unlink()
    assert _refusal(in_two_files) == f"{FIRST}: No such file or directory"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *[(content, "it is not valid JSON: ") for content in (b"", b"\xff\xfe\x00")],
        (b"[]", "it is not a JSON object"),
        (None, "Is a directory"),
    ],
)
def test_unreadable_json_is_refused_by_name(folder: Path, content: bytes | None, reason: str) -> None:
    # In the opposite order of the check, which names the first one.
    for name in ("tokenizer_config.json", "tokenizer.json", "generation_config.json", "config.json"):
        _replace(folder / name, content)
        assert _refusal(folder).startswith(f"{name}: {reason}")
