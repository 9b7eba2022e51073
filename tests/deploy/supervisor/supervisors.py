"""The container's supervisor in a process of its own, above a stand-in for tritonserver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from end_to_end.servers import PATIENCE_S, until
from triton_local.ports import choose_ports
from triton_supervisor.process import model_processes, runs

_FAKE = Path(__file__).with_name("fake_tritonserver.py")
_REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"
# Python would print a traceback of a SIGINT at its start.
_TRITONSERVER = f"""#!/bin/sh
trap "" INT
case "$*" in *--help*) echo "  --model-repository <string>"; exit ;; esac
exec "{sys.executable}" -I -S "{_FAKE}" "$@"
"""
# With other constants. On a busy machine the stand-in is late to answer and to unload.
_PROGRAM = """
from triton_supervisor.signals import block_signals
block_signals()
import sys
from triton_supervisor import signals, supervisor, triton
signals.POLL_S, supervisor.FLUSH_S, supervisor.END_S = 0.05, 0.1, 0.2
supervisor.IDLE_S = triton.METRICS_S = triton._ANSWER_S = triton._UNLOAD_ANSWER_S = 60.0
{changes}
sys.exit(supervisor.main(sys.argv[1:]))
"""


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


class Supervisor:
    """A running supervisor."""

    def __init__(self, process: subprocess.Popen[str], events: Path) -> None:
        self.process = process
        self._events = events
        self.send = process.send_signal

    def events(self) -> list[str]:
        """Return what has happened to tritonserver."""
        return self._events.read_text().splitlines() if self._events.exists() else []

    def wait_for(self, event: str) -> None:
        """Wait for an event of tritonserver; fail if the supervisor ends before."""
        until(lambda: event in self.events() or self.process.poll() is not None, lambda: f"the event {event!r}")
        assert event in self.events(), self.process.communicate()

    def tritonserver(self) -> int:
        """Return the process id of its tritonserver, once it is started."""
        process = psutil.Process(self.process.pid)
        until(lambda: bool(process.children()), lambda: "tritonserver is started")
        (child,) = process.children()
        return int(child.pid)

    def models(self) -> list[int]:
        """Return the process ids of the model's instances."""
        return [process.pid for process in model_processes(self.tritonserver())]

    def ends(self) -> tuple[int, list[str]]:
        """Wait for its end; return the exit code and the supervisor's own lines. Fails on a traceback."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in errors, errors
        own = "triton_supervisor: "
        return self.process.returncode, [line.removeprefix(own) for line in errors.splitlines() if line.startswith(own)]


@contextmanager
def supervisor(
    folder: Path, changes: str = "", program: str = _PROGRAM, /, **environment: str | Path
) -> Iterator[Supervisor]:
    """Run one in a session of its own; kill it at the end if it still runs.

    changes: Python that sets constants of `signals` and `supervisor`. program: what Python runs in place of it.
    """
    fake = folder / "bin" / "tritonserver"
    fake.parent.mkdir()
    fake.write_text(_TRITONSERVER)
    fake.chmod(0o755)
    events = folder / "events"
    own: dict[str, str | Path] = {
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
        "FAKE_EVENTS": events,
        "TRITON_MODEL_CONFIG": "default",
        "TRITON_STUCK_SECONDS": "0",
    }
    # The stand-in has its metrics on the same port.
    port = choose_ports("127.0.0.1", {"http": 0})["http"]
    options = [f"--model-repository={_REPOSITORY}", f"--http-port={port}", f"--metrics-port={port}"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program.replace("{changes}", changes), *options],
        env={**os.environ, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Supervisor(process, events)
    finally:
        # tritonserver and the model, in a group of their own, would hold the pipe open.
        groups = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group.pid, signal.SIGKILL)
        process.communicate()
