"""On a full disk the launcher gives up its log file and goes on."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from triton_local.errors import InvalidSettingError
from triton_local.server_log import ServerLog

FULL = Path("/dev/full")
"""A device on which there is never room."""


def test_a_full_disk_loses_no_line_in_memory_and_is_reported_once() -> None:
    heard: list[str] = []
    with ServerLog(FULL, heard.append) as log:
        for line in ("one", "two", "three"):
            log.add(line)
        assert log.lines() == [
            "one",
            "triton_local: the log file can't be written any more: No space left on device",
            "two",
            "three",
        ]
    assert heard == ["one", "two", "three"]
    # A file that is still open would be a warning now.
    gc.collect()


def test_a_log_file_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path, "Is a directory"), (tmp_path / "file" / "log", "Not a directory")):
        with pytest.raises(InvalidSettingError) as refused:
            ServerLog(place, None)
        assert str(refused.value) == f"log file {place} can't be written: {reason}"
