"""What the supervisor observes: processes, sockets, and liveness probes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from programs.supervisor.fake_tritonserver import MODEL_PROCESS
from programs.supervisor.supervisors import PATIENCE_S, until
from triton_llama.health import Verdict
from triton_supervisor import sockets as flushing
from triton_supervisor.liveness import FAILURES, Liveness, Pace, Watch
from triton_supervisor.process_table import ModelProcess, model_processes
from triton_supervisor.sockets import flush, listening_ports, unsent_bytes

QUICK = Pace(step_age=1, timeout=1, every=0.001, first=0.001)


@pytest.fixture
def model() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the name of a model's."""
    process = subprocess.Popen([sys.executable, "-c", MODEL_PROCESS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def _of(model: subprocess.Popen[bytes]) -> ModelProcess:
    (found,) = (process for process in model_processes(os.getpid()) if process.pid == model.pid)
    return found


def test_a_stopped_process_runs_and_a_zombie_does_not(model: subprocess.Popen[bytes]) -> None:
    process = _of(model)
    os.kill(model.pid, signal.SIGSTOP)
    assert process.runs()
    os.kill(model.pid, signal.SIGKILL)
    # Not reaped yet.
    until(lambda: not process.runs())
    assert process not in model_processes(os.getpid())


def test_a_later_process_with_the_same_pid_is_another_one(model: subprocess.Popen[bytes]) -> None:
    assert not ModelProcess(model.pid, started="1").runs()


def test_only_children_of_the_server_are_model_processes(model: subprocess.Popen[bytes]) -> None:
    assert model_processes(model.pid) == frozenset()


def test_a_gone_process_is_a_death_while_the_server_listens(model: subprocess.Popen[bytes]) -> None:
    listens = True
    lines: list[str] = []
    watch = Watch(os.getpid(), lambda: listens, None, lines.append)
    watch.begin()
    assert watch.death() is None
    model.kill()
    until(lambda: bool(watch.gone()))
    assert watch.death() == f"the model process {model.pid} is gone: it crashed, or was killed"
    # Another process has terminated Triton, which ends the model itself.
    listens = False
    assert watch.death() is None
    assert lines == []


def test_a_process_that_dies_as_the_model_gets_ready_is_a_death(model: subprocess.Popen[bytes]) -> None:
    watch = Watch(os.getpid(), lambda: True, None, lambda line: pytest.fail(line))
    watch.wait()
    model.kill()
    until(lambda: model_processes(os.getpid()) == frozenset())
    watch.begin()
    assert watch.death() == f"the model process {model.pid} is gone: it crashed, or was killed"


def test_a_server_without_a_model_process_is_reported() -> None:
    lines: list[str] = []
    watch = Watch(1, lambda: True, None, lines.append)
    watch.begin()
    assert watch.death() is None
    assert not watch.all_gone()
    assert lines == ["there is no model process below tritonserver: only the probes watch the model"]


def test_only_consecutive_probe_failures_are_a_death() -> None:
    answers = [True, *[False] * (FAILURES - 1), True, *[False] * (FAILURES - 1), True, *[False] * FAILURES]
    asked: list[bool] = []

    def probe() -> Verdict:
        asked.append(answers[len(asked)])
        return Verdict(asked[-1], f"answer {len(asked)}")

    liveness = Liveness(probe, QUICK, lambda line: pytest.fail(line))
    liveness.begin()
    until(lambda: liveness.death() is not None)
    assert liveness.death() == f"answer {len(answers)}"
    assert asked == answers


def test_a_probe_that_raises_is_reported_and_repeated() -> None:
    lines: list[str] = []
    asked = threading.Semaphore(0)

    def probe() -> Verdict:
        asked.release()
        raise LookupError("a bug of ours")

    liveness = Liveness(probe, QUICK, lines.append)
    liveness.begin()
    for _ in range(3 * FAILURES):
        assert asked.acquire(timeout=30)
    assert liveness.death() is None
    liveness.end()
    assert set(lines) == {"the liveness probe failed: LookupError: a bug of ours"}


def test_a_probe_result_during_unloading_is_discarded() -> None:
    liveness = Liveness(lambda: Verdict(False, "no token"), QUICK, lambda line: pytest.fail(line))
    liveness.begin()
    until(lambda: liveness.death() == "no token")
    liveness.end()
    assert liveness.death() is None


def test_a_stuck_model_is_declared_dead_in_time() -> None:
    pace = Pace.for_verdict_within(120)
    assert (pace.step_age, pace.timeout) == (30, 20), "the defaults of the health probes"
    for seconds in (10.0, 120.0, 3600.0):
        pace = Pace.for_verdict_within(seconds)
        assert pace.step_age + FAILURES * (pace.timeout + pace.every) <= seconds


@contextmanager
def _stopped_client() -> Iterator[tuple[socket.socket, int]]:
    """A client that reads nothing, and how many bytes this process has written to it: until the buffers were full."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port in listening_ports(os.getpid())
        before = unsent_bytes(os.getpid())
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, _ = listener.accept()
            with server:
                server.setblocking(False)
                written = 0
                with contextlib.suppress(BlockingIOError):
                    while True:
                        written += server.send(b"x" * 65536)
                until(lambda: unsent_bytes(os.getpid()) > before)
                yield client, written
    assert port not in listening_ports(os.getpid())


def _read(client: socket.socket, size: int) -> None:
    while size > 0:
        size -= len(client.recv(min(size, 1 << 20)))


def _ends(waiting: Iterator[None]) -> float:
    """Iterate to the end."""
    began = time.monotonic()
    for _ in waiting:
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.01)
    return time.monotonic() - began


def test_unsent_bytes_are_those_a_client_has_not_read() -> None:
    before = unsent_bytes(os.getpid())
    with _stopped_client() as (client, written):
        _read(client, written)
        until(lambda: unsent_bytes(os.getpid()) == before)


def test_flush_ends_when_clients_have_read_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flushing, "PAUSE_S", 0.05)
    monkeypatch.setattr(flushing, "STALLED_S", 600.0)
    with _stopped_client() as (client, written):
        waiting = flush(os.getpid(), time.monotonic() + 600)
        until_then = time.monotonic() + 10 * flushing.PAUSE_S
        while time.monotonic() < until_then:
            next(waiting)
            time.sleep(0.01)
        _read(client, written)
        _ends(waiting)


def test_flush_waits_for_a_slow_client_and_abandons_a_stalled_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flushing, "PAUSE_S", 0.05)
    monkeypatch.setattr(flushing, "STALLED_S", 1.0)
    with _stopped_client() as (client, written):
        waiting = flush(os.getpid(), time.monotonic() + 600)
        # A sixteenth at a time: for twice as long as one that reads nothing has.
        for _ in range(8):
            _read(client, written // 16)
            until_then = time.monotonic() + flushing.STALLED_S / 4
            while time.monotonic() < until_then:
                next(waiting)
                time.sleep(0.01)
        assert flushing.STALLED_S / 2 < _ends(waiting) < PATIENCE_S / 2


def test_flush_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "PAUSE_S", 0.05)
    monkeypatch.setattr(flushing, "STALLED_S", 600.0)
    with _stopped_client():
        assert _ends(flush(os.getpid(), time.monotonic() + 0.3)) >= 0.25


def test_a_gone_process_has_no_sockets(model: subprocess.Popen[bytes]) -> None:
    model.kill()
    model.wait()
    assert (listening_ports(model.pid), unsent_bytes(model.pid)) == (set(), 0)
