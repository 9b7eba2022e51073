"""The server's process under its guard (guard.py), and how it is supervised."""

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import triton_llama
import triton_supervisor
from triton_supervisor.loop import PARENT_ENDS
from triton_supervisor.settings import (
    DEFAULT_RESTART_MINUTES,
    DEFAULT_RESTARTS,
    DEFAULT_STUCK_S,
    MOST_RESTART_MINUTES,
    MOST_RESTARTS,
    STOP_MARGIN_S,
)
from triton_supervisor.shared_memory import Ownership

from triton_local.command import ServerCommand
from triton_local.errors import InvalidSettingError
from triton_local.ports import Service

# With -I the packages aren't on the path; their folders come last, so that they hide no standard module.
_BOOT = (
    "import sys; sys.path += sys.argv[1].split(':'); from triton_local.guard import main; sys.exit(main(sys.argv[2:]))"
)
_PACKAGES = ":".join(
    str(Path(file).resolve().parents[1]) for file in (__file__, triton_supervisor.__file__, triton_llama.__file__)
)
# Time for the guard itself, on a slow machine.
_GUARD_SLACK_S = 20.0
# For unloading an unsupervised server's models after its last request: `finalize` has no limit of its own.
_UNLOAD_S = 15.0


@dataclass(frozen=True)
class Guarding:
    """The guard's options. grace: seconds for accepted requests. longest_end: seconds until the server has ended."""

    grace: float
    longest_end: float
    options: tuple[str, ...] = ()


class GuardedProcess:
    """A running server and its guard, and `pid`, that of the tritonserver of the moment.

    on_line: takes every line of output, without its end. on_condition: takes whether it serves, at each change after
    its first start. Both are called in other threads.
    """

    def __init__(
        self,
        command: ServerCommand,
        shm_prefix: str,
        guarding: Guarding,
        on_line: Callable[[str], None],
        on_condition: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._longest_end = guarding.longest_end + _GUARD_SLACK_S
        self._shm_prefix = shm_prefix
        self._on_line = on_line
        self._on_condition = on_condition
        self._served = threading.Event()
        report_read, report_write = os.pipe()
        try:
            self._guard = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGES),
                    *("--parent", str(os.getpid()), "--report-fd", str(report_write)),
                    *("--grace", str(guarding.grace), "--shm-prefix", shm_prefix),
                    *(*guarding.options, "--", *command.arguments),
                ],
                env=dict(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(report_write,),
                start_new_session=True,
            )
        finally:
            os.close(report_write)
        self._pump = threading.Thread(target=self._pump_output, name="tritonserver-log", daemon=True)
        self._pump.start()
        report = os.fdopen(report_read)
        reported = report.readline().split()
        # The guard's own pid, if it ended before it started the server; wait() returns its code.
        self.pid = int(reported[0]) if reported else self._guard.pid
        self._reader = threading.Thread(target=self._read_report, args=(report,), name="tritonserver-pid", daemon=True)
        self._reader.start()

    def is_watched(self) -> bool:
        """Return whether the guard of a supervised server has watched its model, which was ready."""
        return self._served.is_set()

    def exit_code(self) -> int | None:
        """Return 0 drained, 70 the model died, else the server's own, 128 + N for signal N; None while it runs."""
        return _shell_code(self._guard.poll())

    def guard_killed_by(self) -> str | None:
        """Return the name of the signal that ended the guard itself, and the server with it; None if none has."""
        code = self._guard.poll()
        return None if code is None or code >= 0 else signal.Signals(-code).name

    def terminate(self) -> None:
        """Start a graceful shutdown. Returns at once."""
        self._guard.send_signal(PARENT_ENDS)

    def kill(self) -> None:
        """Kill the server and its children. Returns at once."""
        self._guard.send_signal(signal.SIGQUIT)

    def wait(self) -> int:
        """Wait for the end, then for the last line of output; return the exit code."""
        code = _shell_code(self._guard.wait())
        self._reader.join(_GUARD_SLACK_S)
        self._finish_output()
        if self._guard.returncode < 0:  # the guard was killed before it could do this
            Ownership(self._shm_prefix).release()
        assert code is not None
        return code

    def stop(self) -> int:
        """Terminate, wait for the grace period, kill; return the exit code. Bounded."""
        self.terminate()
        try:
            self._guard.wait(self._longest_end)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # and the kernel kills the server with it
        return self.wait()

    def _read_report(self, report: TextIO) -> None:
        with report:
            for line in report:
                pid, condition = line.split()
                self.pid = int(pid)
                if self._served.is_set():
                    self._on_condition(condition == "serving")
                elif condition == "serving":
                    self._served.set()

    def _finish_output(self) -> None:
        self._pump.join(_GUARD_SLACK_S)
        if not self._pump.is_alive() and self._guard.stdout is not None:
            self._guard.stdout.close()

    def _pump_output(self) -> None:
        assert self._guard.stdout is not None
        try:
            for line in self._guard.stdout:
                self._on_line(line.decode(errors="replace").rstrip("\r\n"))
        finally:
            # When a listener raises, the pipe must not fill up and block the server.
            for _ in self._guard.stdout:
                pass


def _shell_code(returncode: int | None) -> int | None:
    return 128 - returncode if returncode is not None and returncode < 0 else returncode


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
        """The model's setting: 0 disables the check."""
        return 0.0 if self.stuck_after is None else self.stuck_after

    def check(self) -> None:
        """Raise InvalidSettingError for seconds or restarts out of bounds."""
        if self.stuck_after is not None and not (math.isfinite(self.stuck_after) and self.stuck_after > 0):
            raise InvalidSettingError(f"stuck after {self.stuck_after} is out of bounds: more than 0 seconds")
        if not (math.isfinite(self.notice) and self.notice >= 0):
            raise InvalidSettingError(f"notice {self.notice} is out of bounds: 0 seconds or more")
        if not 0 <= self.restarts <= MOST_RESTARTS:
            raise InvalidSettingError(f"restarts {self.restarts} is out of bounds: 0 to {MOST_RESTARTS}")
        if not 0 < self.restart_minutes <= MOST_RESTART_MINUTES:
            raise InvalidSettingError(
                f"restart minutes {self.restart_minutes} is out of bounds: more than 0, up to {MOST_RESTART_MINUTES}"
            )

    def guarding(self, grace: float, host: str, ports: Mapping[Service, int], models: Sequence[str]) -> Guarding:
        """Return the guard's options. ports: of the services that are on. models: to load."""
        options = ["--supervised", "--host", host, "--http-port", str(ports["http"]), "--notice", str(self.notice)]
        options += ["--restarts", str(self.restarts), "--restart-minutes", str(self.restart_minutes)]
        for port in ports.values():
            options += ["--hold", str(port)]
        for model in models:
            options += ["--model", model]
        if "metrics" in ports:
            options += ["--metrics-port", str(ports["metrics"])]
        if self.stuck_after is not None:
            options += ["--stuck", str(self.stuck_after)]
        if self.state_file is not None:
            options += ["--state-file", str(self.state_file.absolute())]
        return Guarding(grace, self.notice + grace + STOP_MARGIN_S, tuple(options))


SUPERVISED = Supervised()
"""As in `make serve`."""


def guarding(
    supervised: Supervised | None, grace: float, host: str, ports: Mapping[Service, int], models: Sequence[str]
) -> Guarding:
    """Return the guard's options of a server that listens there. supervised: None is Triton alone."""
    if supervised is None:
        return Guarding(grace + _UNLOAD_S, grace + _UNLOAD_S)
    return supervised.guarding(grace, host, ports, models)
