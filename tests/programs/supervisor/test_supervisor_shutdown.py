"""The supervisor above a stand-in for tritonserver: when it stops the server, how, and its exit code."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from programs.supervisor.supervisors import Supervisor, alive, free_port, supervisor
from triton_supervisor.answers import LOOKS
from triton_supervisor.shared_memory import SHARED_MEMORY
from triton_supervisor.state import announcement_file

# With a SIGTERM before everything is imported.
ENDED_AT_ONCE = """
import os, runpy, signal, sys
class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == "triton_supervisor.cli":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Importing())
runpy.run_module("triton_supervisor", run_name="__main__", alter_sys=True)
"""
GONE = "the model process {} is gone: it crashed, or was killed; the server ends with code 70"


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    """A file: while it exists, a request is running that unloading waits for."""
    (tmp_path / "busy").touch()
    return tmp_path / "busy"


@contextmanager
def _serving(
    folder: Path, constants: Mapping[str, float] | None = None, /, **environment: str | Path
) -> Iterator[Supervisor]:
    with supervisor(folder, constants, **environment) as one:
        one.wait_for("serving")
        yield one


@pytest.mark.parametrize("terminal", [False, True], ids=["SIGTERM", "Ctrl-C"])
def test_accepted_requests_are_answered_before_the_models_are_unloaded_the_one_that_calls_the_other_first(
    tmp_path: Path, busy: Path, terminal: bool
) -> None:
    unloaded = tmp_path / "unloaded"
    with _serving(tmp_path, FAKE_BUSY=busy, FAKE_UNLOADED=unloaded, TRITON_MODEL_CONFIG="streaming") as one:
        (model,) = one.models()
        if terminal:
            # A terminal signals the whole group of its first process.
            os.killpg(one.process.pid, signal.SIGINT)
        else:
            one.send(signal.SIGTERM)
        one.wait_for("draining")
        assert one.process.poll() is None
        assert alive(model)
        busy.unlink()
        assert one.ends() == (0, [])
    assert one.condition()["reason"] == "everything that was accepted is answered"
    assert unloaded.read_text().split() == ["llama_unary", "llama"]


def test_models_that_triton_holds_are_left_once_they_have_answered_everything(tmp_path: Path, busy: Path) -> None:
    with _serving(tmp_path, FAKE_BUSY=busy, FAKE_HOLDS="1", TRITON_MODEL_CONFIG="streaming") as one:
        (model,) = one.models()
        one.send(signal.SIGTERM)
        one.wait_for("draining")
        # Twice as long as it looks whether everything is answered.
        with pytest.raises(subprocess.TimeoutExpired):
            one.process.wait(timeout=2 * LOOKS * 0.05)
        assert alive(model)
        busy.unlink()
        code, (line,) = one.ends()
        assert code == 0
        assert line.startswith(
            "everything that was accepted is answered, and Triton still holds llama_unary and llama: "
        )
        assert not alive(model)
    assert list(SHARED_MEMORY.glob(f"test-supervisor-{one.process.pid}-*")) == []


REFUSED = 'the model can\'t be unloaded (HTTP 503: {"error": "not today"}); tritonserver gets SIGINT instead'
CUT_OFF = "the model isn't unloaded within 1.5 s; requests that still ran are cut off"


@pytest.mark.parametrize(
    ("environment", "constants", "code", "lines"),
    [
        # An idle connection.
        ({"FAKE_WAITS": "1"}, {}, 0, []),
        ({"FAKE_REFUSES": "not today"}, {}, 0, [REFUSED]),
        ({"FAKE_FINALIZES": "600", "TRITON_GRACE_SECONDS": "1"}, {"supervision.UNLOAD_S": 0.5}, 1, [CUT_OFF]),
        # One after the other, longer than a model without processes has to be unloaded.
        pytest.param(
            {"FAKE_INSTANCES": "2", "FAKE_FINALIZES": "2.5"},
            {"supervision._UNLOADS_WITHOUT_PROCESS_S": 2},
            0,
            [],
            marks=pytest.mark.long,
        ),
    ],
    ids=["idle", "refused", "hanging", "two"],
)
def test_sigterm_ends_the_server_and_its_model(
    tmp_path: Path, environment: dict[str, str], constants: dict[str, float], code: int, lines: list[str]
) -> None:
    with _serving(tmp_path, constants, **environment) as one:
        tritonserver, models = one.tritonserver(), one.models()
        assert len(models) == int(environment.get("FAKE_INSTANCES", "1"))
        one.send(signal.SIGTERM)
        assert one.ends() == (code, lines)
        assert not any(alive(pid) for pid in (tritonserver, *models))


@pytest.mark.parametrize(("instances", "draining"), [(1, True), (2, False)])
def test_a_dead_model_process_ends_the_server_with_code_70(
    tmp_path: Path, busy: Path, instances: int, draining: bool
) -> None:
    constants = {"supervision._UNLOADS_WITHOUT_PROCESS_S": 0.3}
    with _serving(tmp_path, constants, FAKE_BUSY=busy, FAKE_INSTANCES=str(instances)) as one:
        tritonserver, models = one.tritonserver(), one.models()
        assert len(models) == instances
        if draining:
            one.send(signal.SIGTERM)
            one.wait_for("draining")
        os.kill(models[-1], signal.SIGKILL)
        code, (line,) = one.ends()
        assert code == 70
        assert line.startswith(f"the model process {models[-1]} ")
        assert draining or line == GONE.format(models[-1])
        assert not any(alive(pid) for pid in (tritonserver, *models))
    assert one.condition()["state"] == "failed"
    assert str(models[-1]) in one.condition()["reason"]


def test_a_signal_during_the_imports_ends_the_server_in_order(tmp_path: Path) -> None:
    """The kernel drops a signal that process 1 neither handles nor blocks; another process would die of it."""
    with supervisor(tmp_path, None, ENDED_AT_ONCE) as one:
        assert one.ends() == (0, [])
    # An announcement has nothing to put in order.
    announcing = subprocess.run([sys.executable, "-c", ENDED_AT_ONCE, "announce"], timeout=60, check=False)
    assert announcing.returncode == -signal.SIGTERM


def test_a_loading_server_ends_at_once(tmp_path: Path) -> None:
    with supervisor(tmp_path, FAKE_LOADS=tmp_path) as one:
        one.wait_for("starting")
        one.tritonserver()
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


def test_an_announced_shutdown_has_no_second_notice(tmp_path: Path) -> None:
    with _serving(tmp_path, TRITON_NOTICE_SECONDS="3600") as one:
        announcement_file(one.state_file).touch()
        one.wait_for("draining")
        assert one.condition()["reason"] == "the end is announced; still serving"
        assert len(one.models()) == 1
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


def test_the_ready_port_answers_503_during_the_notice_which_a_second_signal_ends(tmp_path: Path) -> None:
    port = free_port()
    with _serving(tmp_path, TRITON_NOTICE_SECONDS="3600", TRITON_READY_PORT=str(port)) as one:
        ready = f"http://127.0.0.1:{port}/ready"
        assert (httpx.get(ready).status_code, httpx.get(ready).text) == (200, "the model is loaded\n")
        # Some health checks reset the connection instead of reading the response.
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        one.send(signal.SIGTERM)
        one.wait_for("draining")
        assert (httpx.get(ready).status_code, httpx.get(ready).text) == (503, "told to end\n")
        (model,) = one.models()
        assert alive(model), "the notice is over before its time"
        one.send(signal.SIGTERM)
        assert one.ends() == (128 + signal.SIGKILL, [])
        assert not alive(model)
