"""The supervisor above a stand-in for tritonserver: when it stops the server, how, and its exit code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deploy.supervisor.supervisors import Supervisor, alive, supervisor

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
