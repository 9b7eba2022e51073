"""The supervisor above a tritonserver of a few lines: when it ends the server, how, and with which code."""

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
from pathlib import Path

import pytest
from triton_supervisor.model_processes import model_processes
from unit.supervisors import alive, free_port, supervisor, until

# The model has no ten seconds for its own end.
UNLOADS_QUICKLY = """
import sys
from triton_supervisor import cli, supervision
supervision.UNLOAD_S = 0.5
sys.exit(cli.main(sys.argv[1:]))
"""
# Somebody ends it at once: before it has loaded what it consists of.
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


def test_what_is_accepted_is_cut_off_or_the_code_says_so(tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    with supervisor(tmp_path, {"FAKE_BUSY": str(busy)}) as one:
        one.wait_for("serving")
        model = one.model_process()
        one.send(signal.SIGTERM)
        one.wait_for("draining")
        assert one.process.poll() is None
        assert alive(model)
        busy.unlink()
        assert one.ends() == (0, [])
    assert one.condition()["reason"] == "everything that was accepted is answered"


def test_idle_connections_hold_the_end(tmp_path: Path) -> None:
    with supervisor(tmp_path, {"FAKE_WAITS": "1"}) as one:
        one.wait_for("serving")
        tritonserver = one.tritonserver()
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])
        assert not alive(tritonserver)


def test_a_second_signal_waits_as_the_first_one_does(tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    with supervisor(tmp_path, {"FAKE_BUSY": str(busy)}) as one:
        one.wait_for("serving")
        model = one.model_process()
        one.send(signal.SIGTERM)
        one.wait_for("draining")
        one.send(signal.SIGTERM)
        assert one.ends() == (128 + signal.SIGKILL, [])
        assert not alive(model)


def test_a_model_that_hangs_at_its_end_has_all_the_time_or_ends_as_if_all_was_well(tmp_path: Path) -> None:
    settings = {"FAKE_FINALIZES": "600", "TRITON_GRACE_SECONDS": "1"}
    with supervisor(tmp_path, settings, program=("-c", UNLOADS_QUICKLY)) as one:
        one.wait_for("serving")
        model = one.model_process()
        one.send(signal.SIGTERM)
        assert one.ends() == (
            1,
            ["the model isn't unloaded within 1.5 s; requests that still ran are cut off"],
        )
        assert not alive(model)


def test_instances_that_end_one_after_the_other_are_taken_for_dead_ones(tmp_path: Path) -> None:
    """Longer than one has to be unloaded when no process of it is left."""
    with supervisor(tmp_path, {"FAKE_INSTANCES": "2", "FAKE_FINALIZES": "4"}) as one:
        one.wait_for("serving")
        assert len(model_processes(one.tritonserver())) == 2
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


def test_one_of_two_instances_dies_unnoticed(tmp_path: Path) -> None:
    with supervisor(tmp_path, {"FAKE_INSTANCES": "2"}) as one:
        one.wait_for("serving")
        first, second = (process.pid for process in model_processes(one.tritonserver()))
        os.kill(second, signal.SIGKILL)
        assert one.ends() == (70, [GONE.format(second)])
        assert not alive(first)


def test_ctrl_c_at_the_containers_terminal_ends_tritonserver_itself(tmp_path: Path) -> None:
    """A terminal sends it to the whole group of its first process."""
    busy = tmp_path / "busy"
    busy.touch()
    with supervisor(tmp_path, {"FAKE_BUSY": str(busy)}) as one:
        one.wait_for("serving")
        model = one.model_process()
        os.killpg(one.process.pid, signal.SIGINT)
        one.wait_for("draining")
        assert alive(model)
        busy.unlink()
        assert one.ends() == (0, [])


def test_a_signal_in_the_first_moments_is_lost_or_kills(tmp_path: Path) -> None:
    """Process 1 never hears of one that it neither handles nor blocks; elsewhere it would die of it."""
    with supervisor(tmp_path, {}, program=("-c", ENDED_AT_ONCE)) as one:
        assert one.ends() == (0, [])


def test_an_announcement_does_not_end_of_a_signal() -> None:
    announcing = subprocess.run([sys.executable, "-c", ENDED_AT_ONCE, "announce"], timeout=60, check=False)
    assert announcing.returncode == -signal.SIGTERM


def test_a_state_that_had_no_room_is_never_written(tmp_path: Path) -> None:
    loads = tmp_path / "loads"
    loads.touch()
    with supervisor(tmp_path, {"FAKE_LOADS": str(loads)}) as one:
        one.wait_for("starting")
        until(lambda: _has_child(one.process.pid))
        shutil.rmtree(one.state_file.parent)
        loads.unlink()
        assert one.process.stderr is not None
        line = one.process.stderr.readline()
        assert line.startswith(f"triton_supervisor: the state file {one.state_file} can't be written any more: ")
        one.state_file.parent.mkdir()
        one.wait_for("serving")
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


@pytest.mark.parametrize("draining", [False, True])
def test_a_model_process_that_is_gone_is_not_noticed(tmp_path: Path, draining: bool) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    with supervisor(tmp_path, {"FAKE_BUSY": str(busy)}) as one:
        one.wait_for("serving")
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


def test_the_end_of_a_model_that_is_still_loading_takes_the_grace_period(tmp_path: Path) -> None:
    loads = tmp_path / "loads"
    loads.touch()
    with supervisor(tmp_path, {"FAKE_LOADS": str(loads)}) as one:
        one.wait_for("starting")
        until(lambda: _has_child(one.process.pid))
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


def test_a_notice_is_given_twice_or_not_at_all(tmp_path: Path) -> None:
    with supervisor(tmp_path, {"TRITON_NOTICE_SECONDS": "3600"}) as one:
        one.wait_for("serving")
        # Announced, it serves on; told to end then, it gives no second notice.
        one.announce()
        one.wait_for("draining")
        assert one.condition()["reason"] == "the end is announced; still serving"
        assert alive(one.model_process())
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [])


def test_a_load_balancer_hears_of_the_notice_from_nobody(tmp_path: Path) -> None:
    port = free_port()
    with supervisor(tmp_path, {"TRITON_NOTICE_SECONDS": "3600", "TRITON_READY_PORT": str(port)}) as one:
        one.wait_for("serving")
        assert _ready(port) == (200, "the model is loaded\n")
        _hang_up_on(port)
        one.send(signal.SIGTERM)
        one.wait_for("draining")
        assert _ready(port) == (503, "told to end\n")
        assert alive(one.model_process()), "the notice is over before its time"
        one.send(signal.SIGTERM)
        assert one.ends()[0] == 128 + signal.SIGKILL


def test_a_model_that_cannot_be_unloaded_is_never_told_to_end(tmp_path: Path) -> None:
    with supervisor(tmp_path, {"FAKE_REFUSES": "not today"}) as one:
        one.wait_for("serving")
        one.send(signal.SIGTERM)
        code, lines = one.ends()
    assert (code, lines) == (
        0,
        ['the model can\'t be unloaded (HTTP 503: {"error": "not today"}); tritonserver gets SIGTERM instead'],
    )


def test_a_server_that_ends_by_itself_is_taken_for_a_drained_one(tmp_path: Path) -> None:
    with supervisor(tmp_path, {}) as one:
        one.wait_for("serving")
        model = one.model_process()
        os.kill(one.tritonserver(), signal.SIGKILL)
        assert one.ends() == (128 + signal.SIGKILL, [])
        assert not alive(model), "what the server leaves behind outlives the container's first process"
    assert one.condition()["reason"] == "tritonserver has ended with code 137"


def _ready(port: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as response:
            return int(response.status), str(response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _hang_up_on(port: int) -> None:
    """Ask, and reset the connection instead of reading the answer, as some health checks do."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(b"GET /ready HTTP/1.0\r\n\r\n")


def _has_child(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())
