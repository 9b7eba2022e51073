"""What the supervisor sees: processes, sockets, and the answers to whether the model is alive."""

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
from triton_llama.health import Verdict
from triton_supervisor import flush as flushing
from triton_supervisor.flush import flush
from triton_supervisor.liveness import NOES, Liveness, Pace
from triton_supervisor.model_processes import ModelProcess, model_processes
from triton_supervisor.sockets import listening_ports, unsent_bytes
from triton_supervisor.watch import Watch
from unit.fake_tritonserver import MODEL_PROCESS
from unit.supervisors import PATIENCE_S, until

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


def test_a_process_that_is_stopped_or_an_orphan_counts_as_gone(model: subprocess.Popen[bytes]) -> None:
    process = _of(model)
    os.kill(model.pid, signal.SIGSTOP)
    assert process.runs()
    os.kill(model.pid, signal.SIGKILL)
    # It is not collected yet: what is left of it runs as little as nothing.
    until(lambda: not process.runs())
    assert process not in model_processes(os.getpid())


def test_a_later_process_of_the_same_number_is_taken_for_it(model: subprocess.Popen[bytes]) -> None:
    assert not ModelProcess(model.pid, started="1").runs()


def test_another_servers_model_is_watched(model: subprocess.Popen[bytes]) -> None:
    assert model_processes(model.pid) == frozenset()


def test_a_gone_process_is_no_death_or_is_one_of_a_server_that_ends_by_itself(model: subprocess.Popen[bytes]) -> None:
    listens = True
    said: list[str] = []
    watch = Watch(os.getpid(), lambda: listens, None, said.append)
    watch.begin()
    assert watch.death() is None
    model.kill()
    until(lambda: bool(watch.gone()))
    assert watch.death() == f"the model process {model.pid} is gone: it crashed, or was killed"
    # Triton has been told to end by somebody else, and ends the model itself.
    listens = False
    assert watch.death() is None
    assert said == []


def test_a_process_that_dies_in_the_moment_of_being_ready_is_missed(model: subprocess.Popen[bytes]) -> None:
    watch = Watch(os.getpid(), lambda: True, None, lambda line: pytest.fail(line))
    watch.wait()
    model.kill()
    until(lambda: model_processes(os.getpid()) == frozenset())
    watch.begin()
    assert watch.death() == f"the model process {model.pid} is gone: it crashed, or was killed"


def test_a_server_without_a_model_process_is_watched_silently() -> None:
    said: list[str] = []
    watch = Watch(1, lambda: True, None, said.append)
    watch.begin()
    assert watch.death() is None
    assert not watch.all_gone(), "nobody has seen it end"
    assert said == ["no model process is to be seen below tritonserver: only its answers are watched"]


def test_fewer_noes_in_a_row_than_it_takes_are_a_death() -> None:
    answers = [True, *[False] * (NOES - 1), True, *[False] * (NOES - 1), True, *[False] * NOES]
    asked: list[bool] = []

    def question() -> Verdict:
        asked.append(answers[len(asked)])
        return Verdict(asked[-1], f"answer {len(asked)}")

    liveness = Liveness(question, QUICK, lambda line: pytest.fail(line))
    liveness.begin()
    until(lambda: liveness.death() is not None)
    assert liveness.death() == f"answer {len(answers)}"
    assert asked == answers


def test_a_question_that_fails_is_the_models_death_or_the_last_one() -> None:
    said: list[str] = []
    asked = threading.Semaphore(0)

    def question() -> Verdict:
        asked.release()
        raise LookupError("a bug of ours")

    liveness = Liveness(question, QUICK, said.append)
    liveness.begin()
    for _ in range(3 * NOES):
        assert asked.acquire(timeout=30)
    assert liveness.death() is None
    liveness.end()
    assert set(said) == {"asking whether the model is alive failed: LookupError: a bug of ours"}


def test_an_answer_that_comes_when_the_model_is_being_unloaded_is_a_death() -> None:
    liveness = Liveness(lambda: Verdict(False, "no token"), QUICK, lambda line: pytest.fail(line))
    liveness.begin()
    until(lambda: liveness.death() == "no token")
    liveness.end()
    assert liveness.death() is None


def test_a_model_is_found_dead_later_than_was_asked() -> None:
    pace = Pace.for_verdict_within(120)
    assert (pace.step_age, pace.timeout) == (30, 20), "what the probes have by default"
    for seconds in (10.0, 120.0, 3600.0):
        pace = Pace.for_verdict_within(seconds)
        assert pace.step_age + NOES * (pace.timeout + pace.every) <= seconds


@contextmanager
def _stopped_client() -> Iterator[tuple[socket.socket, int]]:
    """A client that reads nothing, and how much this process has written to it: more than there is room for."""
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
    """Wait for its end; return how many seconds it took."""
    began = time.monotonic()
    for _ in waiting:
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.01)
    return time.monotonic() - began


def test_what_a_client_has_not_taken_is_not_seen() -> None:
    before = unsent_bytes(os.getpid())
    with _stopped_client() as (client, written):
        _read(client, written)
        until(lambda: unsent_bytes(os.getpid()) == before)


def test_the_wait_for_clients_ends_before_they_have_their_answers_or_goes_on_after(
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


def test_a_client_that_reads_slowly_is_given_up_or_one_that_reads_nothing_holds_the_end(
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


def test_a_client_that_reads_nothing_holds_the_end_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "PAUSE_S", 0.05)
    monkeypatch.setattr(flushing, "STALLED_S", 600.0)
    with _stopped_client():
        assert _ends(flush(os.getpid(), time.monotonic() + 0.3)) >= 0.25


def test_nobody_waits_for_a_process_that_is_gone(model: subprocess.Popen[bytes]) -> None:
    model.kill()
    model.wait()
    assert (listening_ports(model.pid), unsent_bytes(model.pid)) == (set(), 0)
