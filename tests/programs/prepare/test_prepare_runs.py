"""Runs after one another, beside one another and after a kill: idempotent, atomic and locked."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engine.checkpoints import save_small
from llama_engine.errors import CheckpointError
from llama_engine.model.manifest import MANIFEST, Manifest
from llama_engine.text.tokenizer import Tokenizer
from programs.prepare.conftest import WEIGHTS, files_of_at_most
from triton_prepare.prepare import prepare
from triton_prepare.progress import PrepareError
from triton_prepare.quantize import compare


def _prepare(model: Path, out: Path, force: bool = False) -> Manifest:
    return prepare(str(model), None, out, "cpu", force)


def _states(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and modification time of every file."""
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@pytest.mark.parametrize("killed", [False, True], ids=["finished", "killed before its last rename"])
def test_a_second_run_changes_nothing(
    original: Path, out: Path, capsys: pytest.CaptureFixture[str], killed: bool
) -> None:
    before = _states(out)
    if killed:
        out.rename(f"{out}.replaced")
    assert _prepare(original, out) == Manifest.read(out)
    assert _states(out) == before
    assert "nothing to do: " in capsys.readouterr().out
    # Without a kill not even a lock: the volume may be read-only.
    assert {path.name for path in out.parent.iterdir()} == {out.name, *([f"{out.name}.lock"] if killed else [])}


def test_force_replaces_a_changed_result(original: Path, out: Path) -> None:
    expected = (out / WEIGHTS).read_bytes()
    changed = bytearray(expected)
    changed[-1] ^= 1
    (out / WEIGHTS).write_bytes(changed)
    with pytest.raises(PrepareError) as refused:
        _prepare(original, out)
    was, now = (hashlib.sha256(content).hexdigest() for content in (expected, changed))
    assert str(refused.value) == (
        f"{out / WEIGHTS} has changed since it was prepared: its SHA-256 is {now}, not {was}; --force prepares it anew"
    )
    for suffix in ("part", "replaced"):
        left = out.with_name(f"{out.name}.{suffix}")
        left.mkdir()
        (left / "model-00001-of-00002.safetensors").write_bytes(b"half")
        (left / MANIFEST).write_text("{}")
    manifest = _prepare(original, out, force=True)
    assert (out / WEIGHTS).read_bytes() == expected
    assert {path.name for path in out.iterdir()} == {*manifest.files, MANIFEST}
    assert {path.name for path in out.parent.iterdir()} == {out.name, f"{out.name}.lock"}


def test_force_replaces_a_result_of_another_source(out: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = save_small(tmp_path / "other", tokenizer, rms_norm_eps=1e-4)
    before = _states(out)
    with pytest.raises(PrepareError, match=r"was prepared from the folder small revision sha256:\w+, not from the"):
        _prepare(other, out)
    assert _states(out) == before
    assert _prepare(other, out, force=True).source.model == "other"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [("thesis.tex", "is there and was not prepared by this program: name another"), (MANIFEST, "can't be read")],
)
def test_a_folder_that_is_no_result_is_never_replaced(
    original: Path, tmp_path: Path, force: bool, name: str, message: str
) -> None:
    (tmp_path / name).write_text("{")
    with pytest.raises((PrepareError, CheckpointError), match=message):
        _prepare(original, tmp_path, force)
    assert (tmp_path / name).read_text() == "{"


def test_concurrent_runs_prepare_once(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(_prepare, [original] * 2, [out] * 2)
    assert first == second == Manifest.read(out)
    assert capsys.readouterr().out.count("verifying: loading it again: done") == 1


def test_a_failed_write_leaves_nothing_under_the_final_name(original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with files_of_at_most(1 << 20), pytest.raises(PrepareError, match=f"^{out}.part can't be written: ") as refused:
        _prepare(original, out)
    assert "\n" not in str(refused.value)
    assert not out.exists()
    before = os.umask(0o027)
    try:
        assert _prepare(original, out) == Manifest.read(out)
    finally:
        os.umask(before)
    # Readable as the umask allows: a server may be another user.
    assert {oct(path.stat().st_mode & 0o777) for path in out.iterdir()} == {"0o640"}


def test_saved_files_that_differ_are_refused() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    tensors = {"a": "1", "b": "2"}
    compare((tensors, logits), ({"b": "2", "a": "1"}, logits + 0.001))
    for other in ({"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": "3"}):
        with pytest.raises(PrepareError, match=r"^1 of \d tensors are not what was quantized, first [bc]$"):
            compare((tensors, logits), (other, logits))
    for shifted in (logits + 0.1, logits * float("nan"), logits.roll(1, 0)):
        with pytest.raises(PrepareError, match="logits"):
            compare((tensors, logits), (tensors, shifted))
