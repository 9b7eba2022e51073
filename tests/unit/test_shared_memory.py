"""Whose files in /dev/shm are removed, and whose stay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from triton_supervisor import shared_memory
from triton_supervisor.shared_memory import (
    Ownership,
    container_prefix,
    prefix_for,
    remove_orphaned,
    remove_shared_memory,
)

PREFIX = prefix_for("0123456789ab")
OTHER = prefix_for("0123456789ab-other")
LOCK = f"triton_llama_owner_of_{PREFIX}"
_OWNER = """
import sys, time
from pathlib import Path
from triton_supervisor import shared_memory
shared_memory.SHARED_MEMORY = Path(sys.argv[1])
ownership = shared_memory.Ownership(sys.argv[2])
print("owned", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm, with a region of an owner and another's, which has no lock."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    for name in (f"{PREFIX}region", f"{OTHER}region"):
        (tmp_path / name).touch()
    return tmp_path


@contextmanager
def _owner(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns the prefix until it is killed."""
    packages = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": packages}
    command = [sys.executable, "-c", _OWNER, str(folder), PREFIX]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"owned\n"
            yield owner
        finally:
            owner.kill()


def _names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def _orphaned() -> list[str]:
    lines: list[str] = []
    remove_orphaned(lines.append)
    return lines


def test_files_are_removed_by_their_prefix(folder: Path) -> None:
    remove_shared_memory(PREFIX)
    assert _names(folder) == {f"{OTHER}region"}
    assert container_prefix() == container_prefix(), "a restart doesn't find it"


def test_the_files_of_an_owner_that_was_killed_are_removed_with_one_line(folder: Path) -> None:
    with _owner(folder) as owner:
        assert _orphaned() == []
        assert _names(folder) == {LOCK, f"{PREFIX}region", f"{OTHER}region"}
        owner.kill()
        owner.wait()
        (line,) = _orphaned()
    assert PREFIX in line
    assert _names(folder) == {f"{OTHER}region"}
    assert _orphaned() == []


def test_an_owner_that_ends_leaves_nothing(folder: Path) -> None:
    ownership = Ownership(PREFIX)
    assert LOCK in _names(folder)
    ownership.release()
    assert _names(folder) == {f"{OTHER}region"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")
def test_the_files_of_another_users_owner_stay(folder: Path) -> None:
    (folder / LOCK).touch()
    os.chown(folder / LOCK, 12345, -1)
    assert _orphaned() == []
    assert f"{PREFIX}region" in _names(folder)


@pytest.mark.parametrize("prefix", ["", "triton", f"{PREFIX[:-1]}*_", prefix_for(""), f"{PREFIX}x"])
def test_a_lock_that_names_no_owner_removes_nothing(folder: Path, prefix: str) -> None:
    (folder / f"triton_llama_owner_of_{prefix}").touch()
    before = _names(folder)
    assert _orphaned() == []
    assert _names(folder) == before


def test_a_lock_that_is_a_link_is_not_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("target") / "file"
    (folder / LOCK).symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Ownership(PREFIX)
    assert not target.exists()
    assert _orphaned() == []
