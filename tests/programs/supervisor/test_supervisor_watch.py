"""What the supervisor observes: processes and liveness probes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs.supervisor.fake_tritonserver import model_process
from programs.supervisor.supervisors import until
from triton_supervisor.health import Verdict
from triton_supervisor.process import model_processes, runs
from triton_supervisor.watch import MAX_FAILURES, Watch


@pytest.fixture
def model(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the name of a model's."""
    with model_process(tmp_path) as process:
        yield process
        process.kill()


def test_a_model_process_is_a_child_of_tritonserver(model: subprocess.Popen[bytes]) -> None:
    (process,) = model_processes(os.getpid())
    assert process.pid == model.pid
    assert model_processes(model.pid) == []


def test_a_stopped_model_process_runs_until_it_is_a_zombie(model: subprocess.Popen[bytes]) -> None:
    (process,) = model_processes(os.getpid())
    os.kill(model.pid, signal.SIGSTOP)
    assert runs(process)
    os.kill(model.pid, signal.SIGKILL)
    # Not reaped yet.
    until(lambda: not runs(process))


def test_a_gone_process_is_a_death(model: subprocess.Popen[bytes]) -> None:
    watch = Watch(os.getpid(), None)
    assert watch.death() is None
    model.kill()
    until(lambda: bool(watch.gone()))
    assert watch.death() == f"the model process {model.pid} is gone: it crashed, or was killed"
    assert watch.all_gone()


def test_only_consecutive_probe_failures_are_a_death() -> None:
    failures = [False] * (MAX_FAILURES - 1)
    answers = [True, *failures, True, *failures, True, *failures, False]
    verdicts = (Verdict(answer, f"answer {number}") for number, answer in enumerate(answers, 1))
    watch = Watch(os.getpid(), lambda: next(verdicts), pause=0.001)
    until(lambda: watch.death() is not None)
    assert watch.death() == f"the model is dead: answer {len(answers)}"
