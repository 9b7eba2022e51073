"""The state file: written atomically, read by probes; and the repository API's answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_supervisor.settings import RefusedError
from triton_supervisor.state import Name, StateFile, read_state
from triton_supervisor.triton import Address, ApiError, RepositoryApi
from unit.peers import HOST, respond, server


@pytest.mark.parametrize("state", ["starting", "serving", "draining", "failed"])
def test_a_probe_reads_the_state(tmp_path: Path, state: Name) -> None:
    path = tmp_path / "new" / "state.json"
    file = StateFile(path, None, pytest.fail)
    file.enter(state, "a reason", pid=7)
    assert read_state(path) == file.current
    assert (file.current.state, file.current.reason, file.current.pid) == (state, "a reason", 7)
    assert list(path.parent.iterdir()) == [path], "a temporary file is left"


def test_a_state_file_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "state.json"
    with pytest.raises(RefusedError, match=f"^TRITON_STATE_FILE is {path}, and can't be written: "):
        StateFile(path, None, pytest.fail)


def test_a_write_that_fails_later_is_reported(tmp_path: Path) -> None:
    path, lines = tmp_path / "folder" / "state.json", list[str]()
    file = StateFile(path, None, lines.append)
    path.unlink()
    path.parent.rmdir()
    file.enter("serving", "a reason")
    assert file.current.state == "serving"
    assert lines == [f"the state file {path} can't be written any more: No such file or directory"]


def test_a_taken_ready_port_is_refused() -> None:
    with server(respond(b"")) as port, pytest.raises(RefusedError, match=f"^TRITON_READY_PORT is {port}, and can't be"):
        StateFile(None, port, pytest.fail)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (b"403 Forbidden", b'{"error":\n "no"}', 'HTTP 403: {"error": "no"}'),
        (b"200 OK", b"[{}]", r"HTTP 200: \[{}\]"),
        (b"200 OK", b"\xff", "HTTP 200: "),
    ],
)
def test_an_unexpected_answer_does_not_count_as_unloaded(status: bytes, body: bytes, message: str) -> None:
    answer = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
    with server(respond(answer)) as port, pytest.raises(ApiError, match=message):
        RepositoryApi(Address(HOST, port), {}).is_loaded("llama")
