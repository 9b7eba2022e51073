"""The supervisor's process (`python -m triton_supervisor plan`), as in the container, and how it supervises."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import triton_supervisor
from triton_supervisor.plan import Plan
from triton_supervisor.settings import (
    DEFAULT_RESTART_MINUTES,
    DEFAULT_RESTARTS,
    DEFAULT_STUCK_S,
    MAX_RESTART_MINUTES,
    MAX_RESTARTS,
    STOP_MARGIN_S,
)
from triton_supervisor.state import Condition

from triton_local.errors import InvalidSettingError

# Time for the supervisor itself, on a slow machine.
_SLACK_S = 20.0
_PACKAGES = Path(triton_supervisor.__file__).resolve().parents[1]


@dataclass(frozen=True)
class Supervised:
    """How a server is supervised. Seconds, a JSON file for probes, and restarts.

    stuck_after: without a step, although one is requested, until the model counts as dead; None disables the probes,
    and only the end of its process is noticed. notice: of serving on before the drain. restarts: of a tritonserver that
    has died, within restart_minutes; 0 ends the server instead.
    """

    stuck_after: float | None = DEFAULT_STUCK_S
    notice: float = 0.0
    state_file: Path | None = None
    restarts: int = DEFAULT_RESTARTS
    restart_minutes: float = DEFAULT_RESTART_MINUTES

    @property
    def stuck_seconds(self) -> float:
        """The plan's and the model's setting: 0 disables the check."""
        return 0.0 if self.stuck_after is None else self.stuck_after

    def check(self) -> None:
        """Raise InvalidSettingError for seconds or restarts out of bounds."""
        if self.stuck_after is not None and not (math.isfinite(self.stuck_after) and self.stuck_after > 0):
            raise InvalidSettingError(f"stuck after {self.stuck_after} is out of bounds: more than 0 seconds")
        if not (math.isfinite(self.notice) and self.notice >= 0):
            raise InvalidSettingError(f"notice {self.notice} is out of bounds: 0 seconds or more")
        if not 0 <= self.restarts <= MAX_RESTARTS:
            raise InvalidSettingError(f"restarts {self.restarts} is out of bounds: 0 to {MAX_RESTARTS}")
        if not 0 < self.restart_minutes <= MAX_RESTART_MINUTES:
            raise InvalidSettingError(
                f"restart minutes {self.restart_minutes} is out of bounds: more than 0, up to {MAX_RESTART_MINUTES}"
            )


class SupervisorProcess:
    """A running supervisor. It drains the server when this process ends, even by SIGKILL."""

    def __init__(self, plan: Plan, state_file: Path, on_line: Callable[[str], None]) -> None:
        """Start it. state_file: the plan's. on_line: takes every line of output, without its end, in another thread."""
        self._state_file = state_file
        self._on_line = on_line
        self._max_end_s = plan.notice + plan.grace + STOP_MARGIN_S + _SLACK_S
        path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "triton_supervisor", "plan"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal is the launcher's, which ends the OpenAI endpoint first.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(plan.to_json().encode())
        self._pump = threading.Thread(target=self._pump_output, name="tritonserver-log", daemon=True)
        self._pump.start()

    def condition(self) -> Condition | None:
        """Return the server's state; None before the supervisor has written one."""
        try:
            return Condition(**json.loads(self._state_file.read_text()))
        except FileNotFoundError:
            return None

    def exit_code(self) -> int | None:
        """Return 0 drained, 70 the model died too often, else tritonserver's own; None while it runs."""
        return _shell_code(self._process.poll())

    def terminate(self) -> None:
        """Start a graceful shutdown. Returns at once."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server and its children. Returns at once."""
        self._process.send_signal(signal.SIGQUIT)

    def wait(self) -> int:
        """Wait for the end, then for the last line of output; return the exit code."""
        code = _shell_code(self._process.wait())
        self._pump.join(_SLACK_S)
        assert code is not None
        return code

    def stop(self) -> int:
        """Terminate, wait for the grace period, kill; return the exit code. Bounded."""
        self.terminate()
        try:
            self._process.wait(self._max_end_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and the kernel kills the server with it
        return self.wait()

    def _pump_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            try:
                for line in stdout:
                    self._on_line(line.decode(errors="replace").rstrip("\r\n"))
            finally:
                # When a listener raises, the pipe must not fill up and block the server.
                for _ in stdout:
                    pass


def _shell_code(returncode: int | None) -> int | None:
    return 128 - returncode if returncode is not None and returncode < 0 else returncode
