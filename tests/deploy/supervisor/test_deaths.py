"""The supervisor above a stand-in for tritonserver that dies: it ends with the reason in its last line."""

from __future__ import annotations

import os
import signal
import time
from itertools import cycle
from pathlib import Path

import pytest
from deploy.supervisor.supervisors import alive, supervisor
from end_to_end.servers import until
from triton_supervisor.health import Limits, Verdict
from triton_supervisor.watch import Watch

STUCK_S = 2.0


def test_any_of_several_model_processes_is_watched(tmp_path: Path) -> None:
    with supervisor(tmp_path, FAKE_INSTANCES="2") as running:
        running.wait_for("ready llama")
        server, models = running.tritonserver(), running.models()
        os.kill(models[-1], signal.SIGKILL)
        line = f"the model process {models[-1]} is gone: it crashed, or was killed; the server ends with code 70"
        assert running.ends() == (70, [line])
        assert not any(map(alive, (server, *models)))


def test_a_model_process_that_dies_as_it_becomes_ready_is_noticed(tmp_path: Path) -> None:
    """The supervisor asks once a second here whether the model is ready, which is true the third time."""
    with supervisor(tmp_path, "signals.POLL_S = 1.0") as running:
        # Before the second question it has looked for processes, which were there at the first one.
        running.wait_for("asked 2")
        (model,) = running.models()
        os.kill(model, signal.SIGKILL)
        code, (line,) = running.ends()
    assert code == 70
    assert line.startswith(f"the model process {model} is gone")


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("abort", 128 + signal.SIGABRT, "tritonserver died of SIGABRT"),
        ("1", 1, "tritonserver has ended with code 1"),
    ],
)
def test_a_start_that_fails_ends_it_with_tritonservers_code(tmp_path: Path, end: str, code: int, reason: str) -> None:
    with supervisor(tmp_path, FAKE_ENDS=end) as running:
        assert running.ends() == (code, [f"{reason}; the server ends with code {code}"])


def test_a_model_that_makes_no_step_is_dead_in_time() -> None:
    last_step = ended = time.monotonic()
    pauses: list[float] = []
    waited = 0.0

    def probe(limits: Limits) -> Verdict:
        nonlocal ended, waited
        pauses.append(time.monotonic() - ended)
        verdict = Verdict(time.monotonic() - last_step <= limits.step_age, "no token")
        if not verdict.ok:
            waited += limits.timeout
            time.sleep(limits.timeout)
        ended = time.monotonic()
        return verdict

    watch = Watch([], probe, STUCK_S)
    until(lambda: watch.death() is not None, lambda: "the model is declared dead")
    assert watch.death() == "the model is dead: no token"
    assert time.monotonic() - last_step >= 0.6 * STUCK_S
    # A busy machine is late: the shortest pause is the one that the watch asks for.
    assert waited + len(pauses) * min(pauses) <= 1.1 * STUCK_S


def test_failures_between_successes_are_no_death() -> None:
    verdicts = cycle([Verdict(True, "a step"), Verdict(False, "no token"), Verdict(False, "no token")])
    # The failures must outlast its patience of 13/24, and a busy machine's pause between two probes must not.
    watch = Watch([], lambda _: next(verdicts), 3 * STUCK_S)
    time.sleep(2 * STUCK_S)
    assert watch.death() is None
    watch.end()
