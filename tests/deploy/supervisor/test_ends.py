"""The supervisor above a stand-in for tritonserver, which it stops or which dies: how, its exit code and last line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
from deploy.supervisor.supervisors import Supervisor, alive, supervisor
from end_to_end.servers import until
from triton_supervisor.health import Limits, Verdict
from triton_supervisor.watch import Watch

# With a SIGTERM before everything is imported.
ENDED_AT_ONCE = """
import os, runpy, signal, sys
class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == "triton_supervisor.supervisor":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Importing())
runpy.run_module("triton_supervisor", run_name="__main__", alter_sys=True)
"""
REFUSED = 'the model can\'t be unloaded (HTTP 503: {"error": "not today"}); tritonserver gets SIGINT instead'
CUT_OFF = "the model isn't unloaded within 1.5 s; requests that still ran are cut off"


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    """A file: while it exists, a request is running that unloading waits for."""
    (tmp_path / "busy").touch()
    return tmp_path / "busy"


@contextmanager
def _serving(folder: Path, changes: str = "", /, **environment: str | Path) -> Iterator[Supervisor]:
    with supervisor(folder, changes, **environment) as running:
        running.wait_for("ready llama")
        yield running


def test_accepted_requests_are_answered_before_the_server_ends(tmp_path: Path, busy: Path) -> None:
    with _serving(tmp_path, FAKE_BUSY=busy) as running:
        (model,) = running.models()
        # As Ctrl-C does: a terminal signals the whole group of its first process.
        os.killpg(running.process.pid, signal.SIGINT)
        running.wait_for("unloading llama")
        time.sleep(0.5)
        assert running.process.poll() is None
        assert alive(model)
        busy.unlink()
        assert running.ends() == (0, [])
    assert running.events()[-1] == "unloaded llama", "everything that was accepted is answered"


def test_a_held_model_is_left_once_the_metrics_show_nothing(tmp_path: Path, busy: Path) -> None:
    """Triton holds a model for as long as a gRPC stream is open, or leaked."""
    environment: dict[str, str | Path] = {"FAKE_BUSY": busy, "FAKE_HOLDS": "1", "TRITON_MODEL_CONFIG": "streaming"}
    with _serving(tmp_path, "supervisor.IDLE_S = 0.3", **environment) as running:
        (model,) = running.models()
        running.send(signal.SIGTERM)
        running.wait_for("unloading llama_unary")
        time.sleep(1.0)
        assert alive(model)
        busy.unlink()
        held = [f"everything is answered, and Triton still holds {name}" for name in ("llama_unary", "llama")]
        assert running.ends() == (0, held)
        assert not alive(model)


@pytest.mark.parametrize(
    ("environment", "changes", "code", "lines"),
    [
        # An idle connection.
        ({"FAKE_WAITS": "1"}, "", 0, []),
        ({"FAKE_REFUSES": "not today"}, "", 0, [REFUSED]),
        # It exists for ever.
        ({"FAKE_BUSY": "/dev/null", "TRITON_GRACE_SECONDS": "1"}, "supervisor.UNLOAD_S = 0.5", 1, [CUT_OFF]),
    ],
    ids=["idle", "refused", "hanging"],
)
def test_sigterm_ends_the_server_and_its_model(
    tmp_path: Path, environment: dict[str, str], changes: str, code: int, lines: list[str]
) -> None:
    with _serving(tmp_path, changes, **environment) as running:
        tritonserver, models = running.tritonserver(), running.models()
        running.send(signal.SIGTERM)
        assert running.ends() == (code, lines)
        assert not any(alive(pid) for pid in (tritonserver, *models))


def test_a_model_that_dies_during_the_drain_is_code_70(tmp_path: Path, busy: Path) -> None:
    with _serving(tmp_path, "supervisor.UNLOADS_WITHOUT_PROCESS_S = 0.3", FAKE_BUSY=busy) as running:
        (model,) = running.models()
        running.send(signal.SIGTERM)
        running.wait_for("unloading llama")
        os.kill(model, signal.SIGKILL)
        code, (*earlier, line) = running.ends()
        assert code == 70
        # On a busy machine Triton's answer may be late.
        assert all(text.startswith("unloading: ") for text in earlier), earlier
        assert line.startswith(f"the model process {model} ")
        assert line.endswith(" before the last request was answered; the server ends with code 70")


def test_a_server_that_became_ready_just_before_the_signal_is_drained(tmp_path: Path) -> None:
    """It may have accepted requests; the supervisor asks it once a second here."""
    with supervisor(tmp_path, "signals.POLL_S = 1.0") as running:
        running.wait_for("asked 2")
        running.send(signal.SIGTERM)
        assert running.ends() == (0, [])
    assert running.events()[-1] == "unloaded llama"


def test_a_signal_during_the_imports_ends_the_server_in_order(tmp_path: Path) -> None:
    """The kernel drops a signal that process 1 neither handles nor blocks; another process would die of it."""
    with supervisor(tmp_path, "", ENDED_AT_ONCE) as running:
        assert running.ends() == (0, [])


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
