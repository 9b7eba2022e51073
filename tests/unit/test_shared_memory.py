"""Which regions in /dev/shm are removed, and which stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_supervisor import shared_memory
from triton_supervisor.shared_memory import container_prefix, prefix_for, remove_shared_memory


def test_regions_are_removed_by_their_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    for owner in ("0123456789ab", "0123456789ab-other"):
        (tmp_path / f"{prefix_for(owner)}region").touch()
    remove_shared_memory(prefix_for("0123456789ab"))
    assert [file.name for file in tmp_path.iterdir()] == [f"{prefix_for('0123456789ab-other')}region"]


def test_a_container_that_is_started_again_has_the_same_prefix() -> None:
    assert container_prefix() == container_prefix()
