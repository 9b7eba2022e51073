"""A run after another, beside one, and after one that was killed: never half a result, never work done twice."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine.small_checkpoints import save_small
from llama_engine.errors import CheckpointError
from llama_engine.model.manifest import MANIFEST, Manifest
from llama_engine.text.tokenizer import Tokenizer
from triton_prepare.errors import MismatchError, PlaceError, SourceError, VerificationError
from triton_prepare.lock import locked
from triton_prepare.places import check_room
from triton_prepare.quantize import Fingerprint, compare
from unit.prepared import prepare_folder, states

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("originals") / "small", tokenizer)


@pytest.fixture(scope="module")
def whole(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "small-int8"
    prepare_folder(original, folder)
    return folder


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """A finished result, to be spoilt."""
    return Path(shutil.copytree(whole, tmp_path / "small-int8"))


def _spoil(folder: Path) -> None:
    """Change a byte of the weights, and not their size."""
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def test_a_finished_result_is_made_again(original: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = states(out)
    manifest = prepare_folder(original, out)
    assert states(out) == before
    assert manifest == Manifest.read(out)
    assert "nothing to do: " in capsys.readouterr().out
    # Not even a lock: the volume may be one that can't be written.
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_copy_of_the_same_checkpoint_elsewhere_is_taken_for_another(
    original: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_folder(Path(shutil.copytree(original, tmp_path / "elsewhere")), out)
    assert "nothing to do: " in capsys.readouterr().out


def test_a_changed_result_passes_for_a_finished_one(original: Path, out: Path) -> None:
    expected = (out / WEIGHTS).read_bytes()
    _spoil(out)
    with pytest.raises(MismatchError) as refused:
        prepare_folder(original, out)
    was, now = (hashlib.sha256(content).hexdigest() for content in (expected, (out / WEIGHTS).read_bytes()))
    assert str(refused.value) == (
        f"{out / WEIGHTS} has changed since it was prepared: its SHA-256 is {now}, not {was}; --force prepares it anew"
    )
    prepare_folder(original, out, force=True)
    assert (out / WEIGHTS).read_bytes() == expected
    assert {path.name for path in out.parent.iterdir()} == {out.name, f"{out.name}.lock"}


def test_a_result_of_another_checkpoint_passes_for_this_ones(out: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = save_small(tmp_path / "other", tokenizer, rms_norm_eps=1e-4)
    before = states(out)
    with pytest.raises(MismatchError, match=r"was prepared from the folder small revision sha256:\w+, not from the"):
        prepare_folder(other, out)
    assert states(out) == before
    assert prepare_folder(other, out, force=True).source.model == "other"


def test_what_a_killed_run_has_left_gets_into_the_result(original: Path, tmp_path: Path) -> None:
    out, part = tmp_path / "out", tmp_path / "out.part"
    part.mkdir()
    (part / "model-00001-of-00002.safetensors").write_bytes(b"half")
    (part / MANIFEST).write_text("{}")
    manifest = prepare_folder(original, out)
    assert {path.name for path in out.iterdir()} == {*manifest.files, MANIFEST}
    assert not part.exists()


def test_a_file_is_readable_for_its_owner_only(original: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        prepare_folder(original, tmp_path / "out")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == {"0o640"}


def test_a_run_that_was_killed_while_it_replaced_a_result_loses_it(
    original: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = states(out)
    out.rename(out.with_name(f"{out.name}.replaced"))
    prepare_folder(original, out)
    assert states(out) == before
    assert "nothing to do: " in capsys.readouterr().out


def test_an_old_result_that_a_killed_run_has_left_stays_for_ever(original: Path, out: Path) -> None:
    old = out.with_name(f"{out.name}.replaced")
    old.mkdir()
    (old / "model.safetensors").write_bytes(b"old")
    prepare_folder(original, out, force=True)
    assert not old.exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_somebody_else_is_replaced(original: Path, tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(PlaceError, match="is there and was not prepared by this program: name another folder"):
        prepare_folder(original, tmp_path / "out", force)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("force", [False, True])
def test_a_result_with_a_manifest_that_cannot_be_read_is_replaced(original: Path, out: Path, force: bool) -> None:
    (out / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        prepare_folder(original, out, force)
    assert (out / WEIGHTS).exists()


def test_two_runs_at_once_do_the_work_twice_or_spoil_it(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(prepare_folder, [original] * 2, [out] * 2)
    assert first == second == Manifest.read(out)
    said = capsys.readouterr().out
    assert said.count("prepare: verifying") == 2, "its beginning and its end"
    assert said.count("nothing to do: ") == 1


def test_a_lock_that_is_held_is_not_waited_for(tmp_path: Path) -> None:
    waits = threading.Event()
    order: list[str] = []

    def second() -> None:
        with locked(tmp_path / "lock", waits.set):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "lock", lambda: pytest.fail("nobody holds it")):
            done = pool.submit(second)
            assert waits.wait(timeout=60)
            order.append("first")
        done.result(timeout=60)
    assert order == ["first", "second"]


@contextmanager
def _files_end_at(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes: as on a disk that becomes full, only without filling one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_something_that_looks_finished(original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _files_end_at(1 << 20), pytest.raises(PlaceError) as refused:
        prepare_folder(original, out)
    assert str(refused.value).startswith(f"{out}.part can't be written: ")
    assert "\n" not in str(refused.value)
    assert not out.exists()
    assert prepare_folder(original, out) == Manifest.read(out)


def test_a_volume_without_room_is_found_out_in_the_middle(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "there" / "yet", 1, "a byte")
    with pytest.raises(PlaceError, match=r"^a checkpoint needs 1.15EB, and the volume of .* has [\d.]+[kMGT]B left$"):
        check_room(tmp_path, 1 << 60, "a checkpoint")


def test_a_place_that_cannot_be_written_ends_in_a_traceback(original: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaceError) as refused:
        prepare_folder(original, tmp_path / "file" / "out")
    assert str(refused.value) == f"{tmp_path / 'file'} can't be written: File exists"


def test_a_difference_between_what_was_quantized_and_what_was_saved_is_overlooked() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    expected = Fingerprint({"a": "1", "b": "2"}, logits)
    compare(expected, Fingerprint({"b": "2", "a": "1"}, logits + 0.001))
    for tensors in ({"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": "3"}):
        with pytest.raises(VerificationError, match=r"^1 of \d tensors are not what was quantized, first [bc]$"):
            compare(expected, Fingerprint(tensors, logits))
    for other in (logits + 0.1, logits * float("nan"), logits.roll(1, 0)):
        with pytest.raises(VerificationError, match="logits"):
            compare(expected, Fingerprint(expected.tensors, other))


@pytest.mark.parametrize("model", ["/does/not/exist", "./absent", "~/absent-checkpoint", "a/b/c"])
def test_a_path_that_leads_nowhere_is_looked_up_on_the_hub(tmp_path: Path, model: str) -> None:
    with pytest.raises(SourceError) as refused:
        prepare_folder(model, tmp_path / "out")
    assert str(refused.value) == f"model is {model!r}: no such folder"
