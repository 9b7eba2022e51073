"""The supervisor above a stand-in for tritonserver: when it stops the server, how, and its exit code."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs.supervisor.supervisors import PROGRAM, Supervisor, alive, free_port, supervisor, until
from triton_supervisor.process_table import model_processes

# Without the ten seconds for the model's own end.
UNLOADS_QUICKLY = """
import sys
from triton_supervisor import cli, supervision
supervision.UNLOAD_S = 0.5
sys.exit(cli.main(sys.argv[1:]))
"""
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
    path = tmp_path / "busy"
    path.touch()
    return path


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    """A file: while it exists, the model is loading."""
    path = tmp_path / "loads"
    path.touch()
    return path


@contextmanager
def _serving(folder: Path, program: Sequence[str] = PROGRAM, **environment: str | Path) -> Iterator[Supervisor]:
    with supervisor(folder, {name: str(value) for name, value in environment.items()}, program=program) as one:
        one.wait_for("serving")
        yield one


@pytest.mark.parametrize("terminal", [False, True], ids=["SIGTERM", "Ctrl-C"])
def test_accepted_requests_are_answered_before_the_end(tmp_path: Path, busy: Path, terminal: bool) -> None:
    with _serving(tmp_path, FAKE_BUSY=busy) as one:
        model = one.model_process()
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


def test_idle_connections_do_not_delay_the_end(tmp_path: Path) -> None:
    with _serving(tmp_path, FAKE_WAITS="1") as one:
        tritonserver = one.tritonserver()
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])
        assert not alive(tritonserver)


def test_a_second_signal_kills(tmp_path: Path, busy: Path) -> None:
    with _serving(tmp_path, FAKE_BUSY=busy) as one:
        model = one.model_process()
        one.send(signal.SIGTERM)
        one.wait_for("draining")
        one.send(signal.SIGTERM)
        assert one.ends() == (128 + signal.SIGKILL, [])
        assert not alive(model)


def test_a_model_that_hangs_in_finalize_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    with _serving(tmp_path, ("-c", UNLOADS_QUICKLY), FAKE_FINALIZES="600", TRITON_GRACE_SECONDS="1") as one:
        model = one.model_process()
        one.send(signal.SIGTERM)
        assert one.ends() == (1, ["the model isn't unloaded within 1.5 s; requests that still ran are cut off"])
        assert not alive(model)


@pytest.mark.long
def test_instances_may_end_one_after_the_other(tmp_path: Path) -> None:
    """Longer than a model without processes has to be unloaded."""
    with _serving(tmp_path, FAKE_INSTANCES="2", FAKE_FINALIZES="4") as one:
        assert len(model_processes(one.tritonserver())) == 2
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


def test_the_death_of_one_of_two_instances_ends_the_server(tmp_path: Path) -> None:
    with _serving(tmp_path, FAKE_INSTANCES="2") as one:
        first, second = (process.pid for process in model_processes(one.tritonserver()))
        os.kill(second, signal.SIGKILL)
        assert one.ends() == (70, [GONE.format(second)])
        assert not alive(first)


@pytest.mark.parametrize("draining", [False, True])
def test_a_dead_model_process_ends_the_server_with_code_70(tmp_path: Path, busy: Path, draining: bool) -> None:
    with _serving(tmp_path, FAKE_BUSY=busy) as one:
        model, tritonserver = one.model_process(), one.tritonserver()
        if draining:
            one.send(signal.SIGTERM)
            one.wait_for("draining")
        os.kill(model, signal.SIGKILL)
        code, (line,) = one.ends()
        assert code == 70
        assert line.startswith(f"the model process {model} ")
        assert draining or line == GONE.format(model)
        assert not alive(tritonserver)
    assert one.condition()["state"] == "failed"
    assert str(model) in one.condition()["reason"]


def test_a_signal_during_the_imports_ends_the_server_in_order(tmp_path: Path) -> None:
    """The kernel drops a signal that process 1 neither handles nor blocks; another process would die of it."""
    with supervisor(tmp_path, {}, program=("-c", ENDED_AT_ONCE)) as one:
        assert one.ends() == (0, [])


def test_a_signal_ends_an_announcement() -> None:
    announcing = subprocess.run([sys.executable, "-c", ENDED_AT_ONCE, "announce"], timeout=60, check=False)
    assert announcing.returncode == -signal.SIGTERM


def test_a_state_that_could_not_be_written_is_written_later(tmp_path: Path, loads: Path) -> None:
    with supervisor(tmp_path, {"FAKE_LOADS": str(loads)}) as one:
        one.wait_for("starting")
        until(one.has_child)
        shutil.rmtree(one.state_file.parent)
        loads.unlink()
        assert one.process.stderr is not None
        line = one.process.stderr.readline()
        assert line.startswith(f"triton_supervisor: the state file {one.state_file} can't be written any more: ")
        one.state_file.parent.mkdir()
        one.wait_for("serving")
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


def test_a_loading_server_ends_at_once(tmp_path: Path, loads: Path) -> None:
    with supervisor(tmp_path, {"FAKE_LOADS": str(loads)}) as one:
        one.wait_for("starting")
        until(one.has_child)
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


def test_an_announced_shutdown_has_no_second_notice(tmp_path: Path) -> None:
    with _serving(tmp_path, TRITON_NOTICE_SECONDS="3600") as one:
        one.announce()
        one.wait_for("draining")
        assert one.condition()["reason"] == "the end is announced; still serving"
        assert alive(one.model_process())
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


def test_the_ready_port_answers_503_during_the_notice(tmp_path: Path) -> None:
    port = free_port()
    with _serving(tmp_path, TRITON_NOTICE_SECONDS="3600", TRITON_READY_PORT=str(port)) as one:
        assert _ready(port) == (200, "the model is loaded\n")
        _hang_up_on(port)
        one.send(signal.SIGTERM)
        one.wait_for("draining")
        assert _ready(port) == (503, "told to end\n")
        assert alive(one.model_process()), "the notice is over before its time"
        one.send(signal.SIGTERM)
        assert one.ends()[0] == 128 + signal.SIGKILL


def test_a_model_that_cannot_be_unloaded_gets_sigterm(tmp_path: Path) -> None:
    with _serving(tmp_path, FAKE_REFUSES="not today") as one:
        one.send(signal.SIGTERM)
        assert one.ends() == (
            0,
            ['the model can\'t be unloaded (HTTP 503: {"error": "not today"}); tritonserver gets SIGTERM instead'],
        )


def test_the_code_of_a_server_that_ends_by_itself_is_returned(tmp_path: Path) -> None:
    with _serving(tmp_path) as one:
        model = one.model_process()
        os.kill(one.tritonserver(), signal.SIGKILL)
        assert one.ends() == (128 + signal.SIGKILL, [])
        assert not alive(model), "an orphan of the server outlives process 1"
    assert one.condition()["reason"] == "tritonserver has ended with code 137"


def _ready(port: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as response:
            return int(response.status), str(response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _hang_up_on(port: int) -> None:
    """Reset the connection instead of reading the response, as some health checks do."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
