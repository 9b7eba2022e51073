"""The supervisor above a stand-in for tritonserver that dies: when it starts it again, and how often."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from programs.supervisor.supervisors import Supervisor, alive, free_port, supervisor, until
from triton_supervisor.health import Verdict
from triton_supervisor.supervisor import Restarts
from triton_supervisor.watch import MAX_FAILURES, Watch

LONG_PAUSES = {"supervisor.FIRST_PAUSE_S": 3600, "supervisor.MAX_PAUSE_S": 3600}
SEGFAULT = "tritonserver died of SIGSEGV"
AT_ONCE = "tritonserver is started again at once"


def _serves_again(running: Supervisor, before: dict[str, str]) -> None:
    """Wait until it serves, later than in this condition."""

    def serves() -> bool:
        assert running.process.poll() is None, running.process.communicate()
        # Read once: the state may change between two reads.
        condition = running.condition()
        return condition["state"] == "serving" and condition["since"] != before["since"]

    until(serves)


def _kill(running: Supervisor, number: signal.Signals = signal.SIGSEGV) -> dict[str, str]:
    """Kill its tritonserver; return the condition before."""
    running.wait_for("serving")
    before = running.condition()
    os.kill(running.tritonserver(), number)
    return before


def test_pauses_between_restarts_double_up_to_a_bound() -> None:
    restarts = Restarts(8, 10)
    answers = [restarts.after_death(1000.0) for _ in range(9)]
    assert [answer and answer[0] for answer in answers] == [0, 1, 2, 4, 8, 16, 30, 30, None]


def test_restarts_count_within_their_time_only() -> None:
    restarts = Restarts(1, 10)
    assert [restarts.after_death(now) for now in (0.0, 599.0, 600.0)] == [(0, "1 of 1"), None, (0, "1 of 1")]
    assert restarts.total == 2


def test_a_dead_tritonserver_is_started_again_with_nothing_left(tmp_path: Path) -> None:
    starts, port = tmp_path / "starts", free_port()
    with supervisor(tmp_path, FAKE_STARTS=starts, TRITON_RESTARTS="1", TRITON_READY_PORT=str(port)) as running:
        running.wait_for("serving")
        (model,) = running.models()
        left = running.region()
        _serves_again(running, _kill(running))
        assert not alive(model)
        assert not left.exists()
        assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 200
        running.send(signal.SIGTERM)
        assert running.ends() == (0, [f"{SEGFAULT}; {AT_ONCE} (1 of 1)"])
    assert starts.read_text().split() == ["0", "1"], "the model reads the number of restarts"


def test_a_dead_model_process_is_noticed_and_replaced(tmp_path: Path) -> None:
    with supervisor(tmp_path, TRITON_RESTARTS="1") as running:
        running.wait_for("serving")
        before, server, (model,) = running.condition(), running.tritonserver(), running.models()
        os.kill(model, signal.SIGKILL)
        _serves_again(running, before)
        assert not alive(server)
        running.send(signal.SIGTERM)
        line = f"the model process {model} is gone: it crashed, or was killed; {AT_ONCE} (1 of 1)"
        assert running.ends() == (0, [line])


def test_any_of_several_model_processes_is_watched(tmp_path: Path) -> None:
    with supervisor(tmp_path, FAKE_INSTANCES="2") as running:
        running.wait_for("serving")
        models = running.models()
        os.kill(models[-1], signal.SIGKILL)
        code, (line,) = running.ends()
        assert code == 70
        assert line.startswith(f"the model process {models[-1]} is gone")
        assert not any(map(alive, models))


def test_too_many_deaths_end_it_with_code_70(tmp_path: Path) -> None:
    with supervisor(tmp_path, TRITON_RESTARTS="1") as running:
        _serves_again(running, _kill(running))
        _kill(running)
        code, lines = running.ends()
        assert code == 70
        assert lines[-1] == f"{SEGFAULT}; restarts so far: 1; the server ends with code 70"
        assert running.condition()["state"] == "failed"


def test_during_a_pause_it_is_not_ready(tmp_path: Path) -> None:
    port = free_port()
    with supervisor(tmp_path, LONG_PAUSES, TRITON_RESTARTS="3", TRITON_READY_PORT=str(port)) as running:
        _serves_again(running, _kill(running))
        _kill(running, signal.SIGABRT)
        running.wait_for("starting")
        reason = "tritonserver died of SIGABRT; tritonserver is started again in 3600 s (2 of 3)"
        answer = httpx.get(f"http://127.0.0.1:{port}/")
        assert (answer.status_code, answer.text) == (503, f"{reason}\n")
        running.send(signal.SIGTERM)
        assert running.ends()[0] == 0


def test_sigterm_while_it_is_started_again_ends_it_with_code_0(tmp_path: Path) -> None:
    """The second start loads for ever."""
    loads = tmp_path / "loads"
    with supervisor(tmp_path, TRITON_RESTARTS="1", FAKE_LOADS=loads) as running:
        running.wait_for("serving")
        loads.touch()
        server = running.tritonserver()
        _kill(running)
        until(lambda: running.condition()["reason"] == "the model is being loaded")
        assert running.tritonserver() != server
        running.send(signal.SIGTERM)
        assert running.ends()[0] == 0


@pytest.mark.parametrize(("crashes", "survives"), [(1, True), (2, False)])
def test_a_crash_before_the_first_readiness_is_tried_again_once(tmp_path: Path, crashes: int, survives: bool) -> None:
    environment = {"FAKE_CRASHES": str(crashes), "FAKE_STARTS": str(tmp_path / "starts"), "TRITON_RESTARTS": "0"}
    with supervisor(tmp_path, **environment) as running:
        if survives:
            running.wait_for("serving")
            running.send(signal.SIGTERM)
        code, lines = running.ends()
    assert lines[0] == "tritonserver died of SIGABRT before it was ready; it is started again once"
    assert code == (0 if survives else 128 + signal.SIGABRT)


def test_a_start_that_fails_is_not_repeated(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    with supervisor(tmp_path, FAKE_STARTS=starts, FAKE_FAILS="0", TRITON_RESTARTS="5") as running:
        assert running.ends() == (1, ["tritonserver has ended with code 1; the server ends with code 1"])
    assert len(starts.read_text().split()) == 1


def test_only_consecutive_probe_failures_are_a_death() -> None:
    failures = [False] * (MAX_FAILURES - 1)
    answers = [True, *failures, True, *failures, True, *failures, False]
    verdicts = (Verdict(answer, f"answer {number}") for number, answer in enumerate(answers, 1))
    watch = Watch(os.getpid(), lambda: next(verdicts), pause=0.001)
    until(lambda: watch.death() is not None)
    assert watch.death() == f"the model is dead: answer {len(answers)}"
