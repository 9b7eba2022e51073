"""The state file says to probes what the supervisor means, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from triton_llama.health import read_state
from triton_supervisor.settings import RefusedError
from triton_supervisor.state_file import State, StateFile, announcement_file


def _silent(line: str) -> None:
    pytest.fail(line)


@pytest.mark.parametrize("state", ["starting", "serving", "draining", "failed"])
def test_a_probe_reads_another_state_than_was_written(tmp_path: Path, state: State) -> None:
    path = tmp_path / "new" / "state.json"
    file = StateFile(path, _silent)
    file.enter(state, "why it is so")
    read = read_state(path)
    assert read is not None
    assert (read.name, read.reason, read.since) == (state, "why it is so", file.condition.since)
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path], "something is left beside it"


def test_an_announcement_is_overlooked_or_outlives_its_run(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    file = StateFile(path, _silent)
    file.enter("serving", "the model is loaded")
    assert not file.announced()
    announcement_file(path).touch()
    assert file.announced()
    read = read_state(path)
    assert read is not None
    assert read.name == "draining"
    assert not StateFile(path, _silent).announced()


def test_since_is_when_it_was_said_last(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json", _silent)
    file.enter("serving", "the model is loaded")
    condition = file.condition
    file.enter("serving", "the model is loaded")
    assert file.condition is condition
    assert json.loads((tmp_path / "state.json").read_text())["since"] == condition.since


def test_a_place_that_cannot_be_written_is_found_out_late(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "state.json"
    with pytest.raises(RefusedError, match=rf"^the state file {path} \(TRITON_STATE_FILE\) can't be written: "):
        StateFile(path, _silent)


def test_a_file_that_cannot_be_written_any_more_stops_the_server_or_is_said_again_and_again(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    said: list[str] = []
    file = StateFile(folder / "state.json", said.append)
    (folder / "state.json").unlink()
    folder.rmdir()
    file.enter("serving", "the model is loaded")
    file.enter("draining", "told to end")
    assert said == [f"the state file {folder / 'state.json'} can't be written any more: No such file or directory"]
    assert file.condition.state == "draining"


def test_a_place_that_is_free_again_is_left_with_an_old_state_or_lost_again_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "state.json"
    said: list[str] = []
    file = StateFile(path, said.append)
    states: tuple[State, ...] = ("serving", "draining")
    for state in states:
        path.unlink()
        path.parent.rmdir()
        file.enter(state, "why it is so")
        since = file.condition.since
        for _ in range(3):
            file.catch_up()
        path.parent.mkdir()
        file.catch_up()
        assert read_state(path) == (state, "why it is so", since)
    assert len(said) == 2
    path.unlink()
    file.catch_up()
    assert not path.exists(), "written though nothing is missing"


def test_without_a_file_there_is_a_state_all_the_same() -> None:
    file = StateFile(None, _silent)
    file.enter("serving", "the model is loaded")
    assert (file.condition.state, file.announced()) == ("serving", False)
