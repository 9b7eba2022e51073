"""The launcher's ready file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from triton_local.errors import InvalidSettingError
from triton_local.ready_file import ReadyFile


def test_it_holds_what_is_shown_and_goes_with_none(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    file = ReadyFile(path)
    file.show({"http": "127.0.0.1:8000", "pid": 1})
    assert json.loads(path.read_text()) == {"http": "127.0.0.1:8000", "pid": 1}
    assert list(tmp_path.iterdir()) == [path]
    file.show(None)
    assert not path.exists()


def test_an_earlier_runs_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.touch()
    ReadyFile(path).show(None)
    assert not path.exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match=r"ready file .* can't be written: No such file"):
        ReadyFile(tmp_path / "nowhere" / "ready.json").show({"pid": 1})
