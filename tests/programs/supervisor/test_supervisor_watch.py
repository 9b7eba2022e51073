"""What the supervisor observes: processes, sockets, and liveness probes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs.supervisor.fake_tritonserver import model_process
from programs.supervisor.supervisors import until
from triton_llama.health import Verdict
from triton_supervisor import sockets
from triton_supervisor.liveness import FAILURES, Liveness, Pace, Watch
from triton_supervisor.process_table import ModelProcess, model_processes

END = object()
QUICK = Pace(step_age=1, timeout=1, every=0.001, first=0.001)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the name of a model's."""
    with model_process(tmp_path) as process:
        yield process
        process.kill()


def test_a_model_process_is_a_child_known_by_its_start_which_runs_while_stopped_but_not_as_a_zombie(
    model: subprocess.Popen[bytes],
) -> None:
    (process,) = model_processes(os.getpid())
    assert process.pid == model.pid
    assert model_processes(model.pid) == frozenset()
    assert not ModelProcess(model.pid, started="1").runs()
    os.kill(model.pid, signal.SIGSTOP)
    assert process.runs()
    os.kill(model.pid, signal.SIGKILL)
    # Not reaped yet.
    until(lambda: not process.runs())
    assert process not in model_processes(os.getpid())


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
    # This process: other tests' servers are not below it.
    watch = Watch(os.getpid(), lambda: True, None, lines.append)
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
    # The model is being unloaded: the result counts no more.
    liveness.end()
    assert liveness.death() is None


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


def test_a_stuck_model_is_declared_dead_in_time() -> None:
    pace = Pace.for_verdict_within(120)
    assert (pace.step_age, pace.timeout) == (30, 20), "the defaults of the health probes"
    for seconds in (10.0, 120.0, 3600.0):
        pace = Pace.for_verdict_within(seconds)
        assert pace.step_age + FAILURES * (pace.timeout + pace.every) <= seconds


@pytest.fixture
def stopped_client() -> Iterator[Callable[[bool], None]]:
    """A client that reads nothing of what this process has written to it, until the buffers were full.

    The fixture is a function that makes it read until the kernel has noticed; everything for True.
    """
    me = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port in sockets.listening_ports(me)
        before = sockets.unsent_bytes(me)
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as server:
            server.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    server.send(b"x" * 65536)
            until(lambda: sockets.unsent_bytes(me) > before)

            def read(everything: bool) -> None:
                most = 0 if everything else sockets.unsent_bytes(me) - 1
                while sockets.unsent_bytes(me) > most:
                    client.recv(1 << 18)
                    time.sleep(0.02)

            yield read
    assert port not in sockets.listening_ports(me)


class Flush:
    """A flush of this process by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 1000.0
        monkeypatch.setattr(sockets, "time", self)

    def monotonic(self) -> float:
        return self._now

    def begin(self, seconds: float = 600.0, reading: Callable[[], bool] = lambda: False) -> None:
        self._waiting = sockets.flush(os.getpid(), self._now + seconds, reading)
        next(self._waiting)

    def waits_for(self, seconds: float) -> bool:
        """Return whether it still waits after this time, looked at often."""
        for _ in range(4):
            self._now += seconds / 4
            if next(self._waiting, END) is END:
                return False
        return True


@pytest.fixture
def flush(monkeypatch: pytest.MonkeyPatch) -> Flush:
    return Flush(monkeypatch)


def test_flush_ends_when_clients_have_read_everything(stopped_client: Callable[[bool], None], flush: Flush) -> None:
    flush.begin()
    assert flush.waits_for(sockets.STALLED_S - 0.1)
    stopped_client(True)
    assert not flush.waits_for(0.1)


def test_flush_waits_for_a_slow_client_and_abandons_a_stalled_one(
    stopped_client: Callable[[bool], None], flush: Flush
) -> None:
    flush.begin()
    for _ in range(3):
        assert flush.waits_for(sockets.STALLED_S - 0.1)
        stopped_client(False)
    assert flush.waits_for(sockets.STALLED_S - 0.1)
    assert not flush.waits_for(sockets.STALLED_S)


@pytest.mark.usefixtures("stopped_client")
def test_flush_ends_at_the_deadline(flush: Flush) -> None:
    flush.begin(3.0)
    assert flush.waits_for(2.9)
    assert not flush.waits_for(0.2)


@pytest.mark.parametrize("leaves", [True, False])
def test_flush_gives_a_client_that_may_still_read_some_time_unless_it_leaves(flush: Flush, leaves: bool) -> None:
    reads = True
    flush.begin(reading=lambda: reads)
    assert flush.waits_for(sockets.READING_S - 1)
    reads = not leaves
    assert flush.waits_for(0.5) is not leaves
    assert leaves or not flush.waits_for(1)


def test_the_bytes_that_a_client_has_taken_are_those_of_its_connection() -> None:
    me = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as server:
            inode = os.fstat(server.fileno()).st_ino
            server.send(b"12345")
            assert client.recv(5) == b"12345"
            until(lambda: sockets.taken_bytes(me, without=()).get(inode) == 5)
            assert inode not in sockets.taken_bytes(me, without=(port,))
        assert inode not in sockets.taken_bytes(me, without=())


def test_a_gone_process_has_no_sockets(model: subprocess.Popen[bytes]) -> None:
    model.kill()
    model.wait()
    assert (sockets.listening_ports(model.pid), sockets.unsent_bytes(model.pid)) == (set(), 0)
