"""What the supervisor observes: processes and liveness probes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs.supervisor.fake_tritonserver import model_process
from programs.supervisor.supervisors import until
from triton_supervisor.health import Verdict
from triton_supervisor.process_table import ModelProcess, model_processes
from triton_supervisor.watch import MAX_FAILURES, Pace, Probes, Watch

QUICK = Pace(step_age=1, timeout=1, every=0.001, first=0.001)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the name of a model's."""
    with model_process(tmp_path) as process:
        yield process
        process.kill()


def test_a_model_process_is_a_child_of_tritonserver(model: subprocess.Popen[bytes]) -> None:
    (process,) = model_processes(os.getpid())
    assert process.pid == model.pid
    assert model_processes(model.pid) == frozenset()


def test_another_process_with_its_pid_is_not_the_model(model: subprocess.Popen[bytes]) -> None:
    assert not ModelProcess(model.pid, started="1").runs()


def test_a_stopped_model_process_runs_and_a_zombie_does_not(model: subprocess.Popen[bytes]) -> None:
    (process,) = model_processes(os.getpid())
    os.kill(model.pid, signal.SIGSTOP)
    assert process.runs()
    os.kill(model.pid, signal.SIGKILL)
    # Not reaped yet.
    until(lambda: not process.runs())


def test_a_gone_process_is_a_death(model: subprocess.Popen[bytes]) -> None:
    watch = Watch(os.getpid(), None)
    assert watch.death() is None
    model.kill()
    until(lambda: bool(watch.gone()))
    assert watch.death() == f"the model process {model.pid} is gone: it crashed, or was killed"
    assert watch.all_gone()


def test_a_server_without_a_model_process_is_watched_by_probes_alone() -> None:
    watch = Watch(os.getpid(), None)
    assert watch.death() is None
    assert not watch.all_gone()


def test_only_consecutive_probe_failures_are_a_death() -> None:
    failures = [False] * (MAX_FAILURES - 1)
    answers = [True, *failures, True, *failures, True, *failures, False]
    count = 0

    def probe() -> Verdict:
        nonlocal count
        count += 1
        return Verdict(answers[count - 1], f"answer {count}")

    probes = Probes(probe, QUICK, pytest.fail)
    probes.begin()
    until(lambda: probes.death is not None)
    assert probes.death == f"answer {len(answers)}"


def test_a_probe_that_raises_is_reported_and_repeated() -> None:
    lines: list[str] = []
    calls = threading.Semaphore(0)

    def probe() -> Verdict:
        calls.release()
        raise LookupError("a bug of ours")

    probes = Probes(probe, QUICK, lines.append)
    probes.begin()
    for _ in range(3 * MAX_FAILURES):
        assert calls.acquire(timeout=30)
    assert probes.death is None
    probes.end()
    assert set(lines) == {"the liveness probe failed: LookupError: a bug of ours"}


@pytest.mark.parametrize("seconds", [10.0, 120.0, 3600.0])
def test_a_stuck_model_is_declared_dead_in_time(seconds: float) -> None:
    pace = Pace.for_verdict_within(seconds)
    assert pace.step_age + MAX_FAILURES * (pace.timeout + pace.every) <= seconds
