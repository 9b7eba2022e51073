"""A command under guard (see guard.py), its output line by line.

Knows nothing about Triton: it starts, signals, waits, and hands every line of output over.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import triton_llama
import triton_supervisor
from triton_supervisor.process import remove_shared_memory

from triton_local.command import ServerCommand

# With -I the packages aren't on the path; their folders come last, so that nothing in there hides a standard module.
_BOOT = (
    "import sys; sys.path += sys.argv[1].split(':'); from triton_local.guard import main; sys.exit(main(sys.argv[2:]))"
)
_PACKAGES = ":".join(
    str(Path(file).resolve().parents[1]) for file in (__file__, triton_supervisor.__file__, triton_llama.__file__)
)
# What the guard itself may take beyond what it gives the server: a slow machine.
_GUARD_SLACK_S = 20.0


@dataclass(frozen=True)
class Guarding:
    """What the guard is told, in seconds and options.

    grace: what running requests get after the first request to stop. longest_end: what the server may take to end.
    """

    grace: float
    longest_end: float
    options: tuple[str, ...] = ()


class GuardedProcess:
    """A running server and its guard.

    `on_line` is called from a thread of its own with every line of output, without its end.
    """

    def __init__(
        self, command: ServerCommand, shm_prefix: str, guarding: Guarding, on_line: Callable[[str], None]
    ) -> None:
        self._longest_end = guarding.longest_end + _GUARD_SLACK_S
        self._shm_prefix = shm_prefix
        self._on_line = on_line
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
        with os.fdopen(report_read) as report:
            reported = report.readline().strip()
        # The guard's own pid stands in where it ended before it could start anything; wait() tells with which code.
        self.pid = int(reported) if reported else self._guard.pid

    def exit_code(self) -> int | None:
        """What it ended with: 0 drained, 70 the model was dead, else the server's own, 128 + N for signal N.

        None while it runs.
        """
        return _shell_code(self._guard.poll())

    def terminate(self) -> None:
        """Ask the server to finish what it has accepted and end. Returns at once."""
        self._guard.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the server and its children by force. Returns at once."""
        self._guard.send_signal(signal.SIGQUIT)

    def wait(self) -> int:
        """Wait for the end, then for the last line of output; the exit code."""
        code = _shell_code(self._guard.wait())
        self._finish_output()
        if self._guard.returncode < 0:  # somebody killed the guard, so it couldn't do this
            remove_shared_memory(self._shm_prefix)
        assert code is not None
        return code

    def stop(self) -> int:
        """Terminate, wait for the grace period, kill; the exit code. Bounded."""
        self.terminate()
        try:
            self._guard.wait(self._longest_end)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # and the kernel kills the server with it
        return self.wait()

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
            # A listener that fails must not make the server wait for ever in front of a full pipe.
            for _ in self._guard.stdout:
                pass


def _shell_code(returncode: int | None) -> int | None:
    return 128 - returncode if returncode is not None and returncode < 0 else returncode
