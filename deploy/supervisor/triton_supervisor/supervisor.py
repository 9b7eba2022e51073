"""The supervisor of one tritonserver: starts it, watches its model, and drains it. Both end together.

Nothing is restarted here: compose, Kubernetes or systemd starts the supervisor again.

When the model dies, tritonserver is killed at once: that closes its clients' connections, which Triton itself would
leave open for ever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence

import psutil

from triton_supervisor.health import healthy
from triton_supervisor.process import (
    exit_code,
    kill_server,
    model_processes,
    remove_shared_memory,
    set_stack_limit,
    start_server,
)
from triton_supervisor.settings import UNLOAD_S, RefusedError, Settings
from triton_supervisor.signals import END, KILL, wait_for_signal
from triton_supervisor.triton import AnswerError, RepositoryApi, is_idle
from triton_supervisor.tritonserver_options import CONTROL_HEADER, Options, served_models, server_command
from triton_supervisor.watch import Watch

# Exit codes.
DRAINED = 0
CUT_OFF = 1
"""The model wasn't unloaded in time: sequences still ran, or its `finalize` hung."""
REFUSED = 2
DEAD = 70
"""The model or tritonserver died (EX_SOFTWARE of sysexits.h)."""
KILLED = 128 + signal.SIGKILL

IDLE_S = 2.0
"""Seconds without waiting or running requests after which a model that Triton still holds counts as unloaded. Not 0: a
request between Triton's queue and the model is in neither metric, and the model's metrics are up to 0.2 s old."""
FLUSH_S = 2.0
"""Seconds for clients to read the last bytes before tritonserver is interrupted."""
END_S = 2.0
"""Seconds for tritonserver to end by itself; it waits for idle connections and writes its traces."""
UNLOADS_WITHOUT_PROCESS_S = 3.0
"""Seconds after the end of a model's process within which Triton notices it while it unloads the model."""


def main(arguments: Sequence[str]) -> int:
    """Supervise a tritonserver with these options; return the exit code. `block_signals` must have been called."""
    try:
        return Supervisor(arguments, Settings.of(os.environ)).run()
    except RefusedError as error:
        say(str(error))
        return REFUSED


def say(message: str) -> None:
    """Write a line to standard error: in one write, because tritonserver writes there. Its reader may have left."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"triton_supervisor: {message}\n".encode())


class _EndError(Exception):
    """The server's end before the drain is complete: the exit code, and the reason for the last line."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code


class Supervisor:
    """Supervises one tritonserver. Not thread-safe."""

    def __init__(self, arguments: Sequence[str], settings: Settings) -> None:
        """arguments: tritonserver's options from the operator. Raises RefusedError."""
        self._settings = settings
        self._options = Options.parse(arguments)
        self._models = served_models(self._options.repository, settings.config)
        # Names and key are this start's own.
        self._shm_prefix = f"triton_python_backend_shm_region_{secrets.token_hex(8)}_"
        key = secrets.token_urlsafe(32)
        self._command = server_command(arguments, self._options, self._models, settings, key, self._shm_prefix)
        self._api = RepositoryApi(self._options.http, {CONTROL_HEADER: key})
        # The launcher; its end requests the shutdown. In a container there is none.
        self._parent = os.getppid()
        self._told_to_end = False
        self._processes: set[psutil.Process] = set()

    def run(self) -> int:
        """Supervise until the end; return the exit code. Raises RefusedError if tritonserver can't be started."""
        set_stack_limit()
        try:
            self._server = start_server(self._command, self._settings.for_model(os.environ))
        except OSError as error:  # no memory or no process left
            raise RefusedError(f"tritonserver can't be started: {error}") from error
        try:
            if not self._wait_until_loaded():
                # Before it listens, Triton has accepted no request.
                return self._end(wait=END_S)
            watch = self._serve()
            return self._drain(watch)
        except _EndError as end:
            if str(end):
                say(f"{end}; the server ends with code {end.code}")
            return end.code
        finally:
            kill_server(self._server, self._processes)
            remove_shared_memory(self._shm_prefix)

    def _wait(self) -> int | None:
        """Wait for a moment; return tritonserver's exit code once it has ended. Raises _EndError for SIGQUIT."""
        number = wait_for_signal()
        if number == KILL:
            raise _EndError(KILLED)
        if number in END or os.getppid() != self._parent:
            self._told_to_end = True
        return exit_code(self._server)

    def _wait_until_loaded(self) -> bool:
        """Return True once the models are loaded, False if the shutdown is requested before."""
        while True:
            earlier, self._processes = self._processes, set(model_processes(self._server.pid))
            # Asked first: what was ready before the signal may have accepted requests.
            if all(self._api.is_ready(model) for model in self._models):
                # With those of a moment ago: one that has died since the model became ready is gone from the list.
                self._processes.update(earlier, model_processes(self._server.pid))
                return True
            if self._told_to_end:
                return False
            if (code := self._wait()) is not None:
                # tritonserver's own last error has the reason.
                raise _EndError(code, _describe_end(code))

    def _serve(self) -> Watch:
        """Watch the model until the shutdown is requested; return the watch, which has ended."""
        probe = functools.partial(healthy, self._options.http, self._options.metrics)
        watch = Watch(self._processes, probe, self._settings.stuck)
        while not self._told_to_end:
            if (death := watch.death()) is not None:
                raise _EndError(DEAD, death)
            if (code := self._wait()) is not None:
                raise _EndError(DEAD, _describe_end(code))
        watch.end()
        return watch

    # --- The drain

    def _drain(self, watch: Watch) -> int:
        """Unload the models, each before those that it calls, then end tritonserver; return the exit code."""
        bound = self._settings.grace + UNLOAD_S
        deadline = time.monotonic() + bound
        for model in reversed(self._models):
            try:
                self._api.unload(model)
            except AnswerError as error:
                # On a signal Triton also finishes requests, though it waits for idle connections first.
                say(f"the model can't be unloaded ({error}); tritonserver gets SIGINT instead")
                return self._end(wait=deadline - time.monotonic(), code_if_killed=CUT_OFF)
            if not self._wait_until_unloaded(model, watch, deadline):
                say(f"the model isn't unloaded within {bound:g} s; requests that still ran are cut off")
                return CUT_OFF
        flushed = time.monotonic() + FLUSH_S
        while time.monotonic() < flushed and self._wait() is None:
            pass
        return self._end(wait=END_S)

    def _wait_until_unloaded(self, model: str, watch: Watch, deadline: float) -> bool:
        """Wait until a model is unloaded, or everything is answered; return False once the deadline is over."""
        idle_since = gone_since = None
        while (now := time.monotonic()) <= deadline:
            try:
                if not self._api.is_loaded(model):
                    return True
            except AnswerError as error:
                say(f"unloading: {error}")
            idle = self._options.metrics is not None and is_idle(self._options.metrics)
            idle_since = (idle_since or now) if idle else None
            if idle_since is not None and now - idle_since >= IDLE_S:
                # A gRPC stream that its client has left open.
                say(f"everything is answered, and Triton still holds {model}")
                return True
            gone_since = (gone_since or now) if watch.all_gone() else None
            if gone_since is not None and now - gone_since > UNLOADS_WITHOUT_PROCESS_S:
                reason = f"the model process {watch.gone()[0]} ended"
                raise _EndError(DEAD, f"{reason} before the last request was answered")
            if (code := self._wait()) is not None:
                raise _EndError(DEAD, f"{_describe_end(code)} before the last request was answered")
        return False

    def _end(self, *, wait: float, code_if_killed: int = DRAINED) -> int:
        """Interrupt tritonserver, and wait so many seconds for its end; return the exit code."""
        # tritonserver takes SIGINT as SIGTERM, which is blocked.
        self._server.send_signal(signal.SIGINT)
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            if self._wait() is not None:
                return DRAINED
        return code_if_killed


def _describe_end(code: int) -> str:
    """Return how tritonserver ended, with the signal's name if it died of one."""
    try:
        return f"tritonserver died of {signal.Signals(code - 128).name}"
    except ValueError:
        return f"tritonserver has ended with code {code}"
