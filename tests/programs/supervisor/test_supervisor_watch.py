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
from collections.abc import Callable, Iterator

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


def test_a_stopped_process_runs_and_a_zombie_does_not(model: subprocess.Popen[bytes]) -> None:
    (process,) = model_processes(os.getpid())
    assert process.pid == model.pid
    os.kill(model.pid, signal.SIGSTOP)
    assert process.runs()
    os.kill(model.pid, signal.SIGKILL)
    # Not reaped yet.
    until(lambda: not process.runs())
    assert process not in model_processes(os.getpid())


def test_a_model_process_is_a_child_of_the_server_and_known_by_its_start(model: subprocess.Popen[bytes]) -> None:
    assert model_processes(model.pid) == frozenset()
    assert not ModelProcess(model.pid, started="1").runs()


def test_a_gone_process_is_a_death_while_the_server_listens(model: subprocess.Popen[bytes]) -> None:
    listens = True
    watch = Watch(os.getpid(), lambda: listens, None, pytest.fail)
    watch.begin()
    assert watch.death() is None
    model.kill()
    until(lambda: bool(watch.gone()))
    assert watch.death() == f"the model process {model.pid} is gone: it crashed, or was killed"
    # Another process has terminated Triton, which ends the model itself.
    listens = False
    assert watch.death() is None


def test_a_process_that_dies_as_the_model_gets_ready_is_a_death(model: subprocess.Popen[bytes]) -> None:
    watch = Watch(os.getpid(), lambda: True, None, pytest.fail)
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

    liveness = Liveness(probe, QUICK, pytest.fail)
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
    liveness = Liveness(lambda: Verdict(False, "no token"), QUICK, pytest.fail)
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


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "PAUSE_S", 0.05)
    monkeypatch.setattr(flushing, "STALLED_S", 600.0)


@pytest.fixture
def stopped_client() -> Iterator[Callable[[int], None]]:
    """A client that reads nothing of what this process has written to it, until the buffers were full.

    The fixture is a function that makes it read a fraction: all for 1, a half for 2.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port in listening_ports(os.getpid())
        before, written = unsent_bytes(os.getpid()), 0
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, _ = listener.accept()
            with server:
                server.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        written += server.send(b"x" * 65536)
                until(lambda: unsent_bytes(os.getpid()) > before)

                def read(parts: int) -> None:
                    size = written // parts
                    while size > 0:
                        size -= len(client.recv(min(size, 1 << 20)))

                yield read
    assert port not in listening_ports(os.getpid())


def _waits(waiting: Iterator[None], seconds: float) -> None:
    """Check that it goes on for this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        next(waiting)
        time.sleep(0.01)


def _ends(waiting: Iterator[None]) -> float:
    """Iterate to the end; return the seconds."""
    began = time.monotonic()
    for _ in waiting:
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.01)
    return time.monotonic() - began


def test_unsent_bytes_are_those_a_client_has_not_read(stopped_client: Callable[[int], None]) -> None:
    stopped_client(1)
    until(lambda: unsent_bytes(os.getpid()) == 0)


def test_flush_ends_when_clients_have_read_everything(stopped_client: Callable[[int], None]) -> None:
    waiting = flush(os.getpid(), time.monotonic() + 600)
    _waits(waiting, 10 * flushing.PAUSE_S)
    stopped_client(1)
    _ends(waiting)


def test_flush_waits_for_a_slow_client_and_abandons_a_stalled_one(
    stopped_client: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "STALLED_S", 1.0)
    waiting = flush(os.getpid(), time.monotonic() + 600)
    # A sixteenth at a time: for twice as long as one that reads nothing has.
    for _ in range(8):
        stopped_client(16)
        _waits(waiting, flushing.STALLED_S / 4)
    assert flushing.STALLED_S / 2 < _ends(waiting) < PATIENCE_S / 2


@pytest.mark.usefixtures("stopped_client")
def test_flush_ends_at_the_deadline() -> None:
    assert _ends(flush(os.getpid(), time.monotonic() + 0.3)) >= 0.25


def test_a_gone_process_has_no_sockets(model: subprocess.Popen[bytes]) -> None:
    model.kill()
    model.wait()
    assert (listening_ports(model.pid), unsent_bytes(model.pid)) == (set(), 0)
