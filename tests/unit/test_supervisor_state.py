"""The state file: written atomically, retried, read by probes."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_supervisor.health import read_state
from triton_supervisor.settings import RefusedError
from triton_supervisor.state import State, StateFile, announcement_file


@pytest.mark.parametrize("state", ["starting", "serving", "draining", "failed"])
def test_a_probe_reads_the_state(tmp_path: Path, state: State) -> None:
    path = tmp_path / "new" / "state.json"
    file = StateFile(path, pytest.fail)
    file.enter(state, "a reason")
    read = read_state(path)
    assert read is not None
    assert (read.name, read.reason, read.since) == (state, "a reason", file.condition.since)
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path], "a temporary file is left"
    # The time of the last change.
    file.enter(state, "a reason")
    assert read_state(path) == read


def test_an_announcement_ends_with_its_run_and_needs_a_file(tmp_path: Path) -> None:
    without = StateFile(None, pytest.fail)
    without.enter("serving", "the model is loaded")
    assert (without.condition.state, without.announced()) == ("serving", False)
    path = tmp_path / "state.json"
    file = StateFile(path, pytest.fail)
    file.enter("serving", "the model is loaded")
    assert not file.announced()
    announcement_file(path).touch()
    assert file.announced()
    read = read_state(path)
    assert read is not None
    assert read.name == "draining"
    assert not StateFile(path, pytest.fail).announced()


def test_a_state_file_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "state.json"
    with pytest.raises(RefusedError, match=rf"^the state file {path} \(TRITON_STATE_FILE\) can't be written: "):
        StateFile(path, pytest.fail)


def test_a_failed_write_is_reported_once_and_retried_until_a_success(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "state.json"
    lines: list[str] = []
    file = StateFile(path, lines.append)
    states: tuple[State, ...] = ("serving", "draining")
    for state in states:
        path.unlink()
        path.parent.rmdir()
        file.enter(state, "another reason")
        file.enter(state, "a reason")
        since = file.condition.since
        for _ in range(3):
            file.catch_up()
        path.parent.mkdir()
        file.catch_up()
        assert read_state(path) == (state, "a reason", since)
    assert lines == [f"the state file {path} can't be written any more: No such file or directory"] * 2
    path.unlink()
    file.catch_up()
    assert not path.exists(), "written without a need"
