"""The supervisor of one tritonserver: starts it, watches its model, starts it again when it has died, and drains it.

    STARTING ── SERVING ──(signal)── NOTICE ── UNLOADING ── ENDING ── the end
        │  ▲       └──(dead)── PAUSED ──▶ STARTING, or the end with code 70 after too many deaths
        └──┴───(signal)── ENDING: no request was accepted yet

When the model dies, tritonserver is killed at once: that closes its clients' connections, which Triton itself would
leave open for ever.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from triton_supervisor.command import KEY_HEADER, Options, served_models, server_command
from triton_supervisor.process import (
    ServerProcess,
    adopt_orphans,
    kill_children,
    remove_shared_memory,
    set_stack_limit,
    shared_memory_prefix,
    start_server,
)
from triton_supervisor.settings import UNLOAD_S, RefusedError, Settings
from triton_supervisor.signals import END, KILL, wait_for_signal
from triton_supervisor.state import ANSWERED, StateFile
from triton_supervisor.triton import ApiError, RepositoryApi, read_load
from triton_supervisor.watch import Watch, live_probe

# Exit codes.
DRAINED = 0
CUT_OFF = 1
"""The model wasn't unloaded in time: sequences still ran, or its `finalize` hung."""
REFUSED = 2
DEAD = 70
"""The model died (EX_SOFTWARE of sysexits.h), and the server isn't started again, or not any more."""

IDLE_S = 2.0
"""Seconds without waiting or running requests after which a model that Triton still holds counts as unloaded. Not 0: a
request between Triton's queue and the model is in neither metric, and the model's metrics are up to 0.2 s old."""
FLUSH_S = 2.0
"""Seconds for clients to read the last bytes before tritonserver is interrupted."""
END_S = 2.0
"""Seconds for tritonserver to end by itself; it waits for idle connections and writes its traces."""
UNLOADS_WITHOUT_PROCESS_S = 3.0
"""Seconds after the end of a model's process within which Triton notices it while it unloads the model."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""Maximum pause before a restart."""

_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_KILLED = 128 + signal.SIGKILL


def main(arguments: Sequence[str]) -> int:
    """Supervise a tritonserver with these options; return the exit code. `block_signals` must have been called."""
    try:
        supervisor = Supervisor(arguments, Settings.of(os.environ))
    except RefusedError as error:
        say(str(error))
        return REFUSED
    return supervisor.run()


def say(message: str) -> None:
    """Write a line to standard error: in one write, because tritonserver writes there. Its reader may have left."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"triton_supervisor: {message}\n".encode())


class Phase(Enum):
    """The supervisor's current phase."""

    STARTING = auto()
    """tritonserver loads the models."""
    SERVING = auto()
    NOTICE = auto()
    """The shutdown has been requested; it serves on, so that load balancers notice."""
    UNLOADING = auto()
    """New requests are refused, accepted ones are answered."""
    ENDING = auto()
    """tritonserver is told to end, and killed a moment later."""
    PAUSED = auto()
    """tritonserver has died, and is started again after a pause."""


class Restarts:
    """Bounds the restarts within a time.

    The first follows at once, the second after FIRST_PAUSE_S, each further one after twice the pause before.

    total: since the supervisor's own start.
    """

    def __init__(self, limit: int, minutes: float) -> None:
        """limit: restarts within `minutes`; 0 restarts nothing."""
        self._limit = limit
        self._seconds = minutes * 60
        self._times: deque[float] = deque()
        self.total = 0

    def after_death(self, now: float) -> tuple[float, str] | None:
        """Count a restart. Return its pause in seconds and its number as text ("2 of 5"); None beyond the limit."""
        while self._times and now - self._times[0] >= self._seconds:
            self._times.popleft()
        earlier = len(self._times)
        if earlier >= self._limit:
            return None
        self._times.append(now)
        self.total += 1
        pause = min(FIRST_PAUSE_S * 2 ** (earlier - 1), MAX_PAUSE_S) if earlier else 0.0
        return pause, f"{earlier + 1} of {self._limit}"


class Supervisor:
    """Supervises one tritonserver. Not thread-safe."""

    def __init__(self, arguments: Sequence[str], settings: Settings) -> None:
        """arguments: tritonserver's options from the operator. Raises RefusedError."""
        self._settings = settings
        self._options = Options.parse(arguments)
        self._models = served_models(self._options.repository, settings.config)
        self._shm_prefix = shared_memory_prefix()
        # Each supervisor has a key of its own.
        key = secrets.token_urlsafe(32)
        self._command = server_command(arguments, self._options, self._models, settings, key, self._shm_prefix)
        self._api = RepositoryApi(self._options.http, {KEY_HEADER: key})
        self._state = StateFile(settings.state_file, settings.ready_port, say)
        self._restarts = Restarts(settings.restarts, settings.restart_minutes)
        # The launcher; its end requests the shutdown. In a container there is none.
        self._parent = os.getppid()
        self._phase = Phase.STARTING
        self._code: int | None = None
        self._served = False
        self._start_crashed = False
        self._server: ServerProcess | None = None
        self._watch: Watch | None = None
        self._death: str | None = None
        # When the phase ends or goes on, on the monotonic clock.
        self._until = 0.0
        self._deadline = 0.0
        self._idle_since: float | None = None
        self._gone_since: float | None = None
        # Models that are left, each before those that call it; the last one is being unloaded.
        self._to_unload: list[str] = []
        self._end_code = DRAINED
        self._interrupted = False

    def run(self) -> int:
        """Supervise until the end; return the exit code."""
        adopt_orphans()
        set_stack_limit()
        try:
            self._start()
            while self._code is None:
                number = wait_for_signal()
                if number == KILL:
                    self._code = _KILLED
                elif number in END or os.getppid() != self._parent:
                    self._request_end()
                if self._code is None:
                    self._advance()
            return self._code
        finally:
            self._clean_up()

    def _request_end(self) -> None:
        """Begin the shutdown; no effect a second time."""
        if self._phase is Phase.PAUSED:
            self._code = DRAINED
        elif self._phase is Phase.STARTING:
            self._state.enter("draining", "told to end")
            # Before it listens, Triton has accepted no request.
            self._end_server(DRAINED, flush=0.0, wait=END_S)
        elif self._phase is Phase.SERVING:
            self._state.enter("draining", "told to end")
            self._phase = Phase.NOTICE
            self._until = time.monotonic() + self._settings.notice

    def _advance(self) -> None:
        """Take the next step without blocking for long."""
        if self._phase is Phase.PAUSED:
            if time.monotonic() >= self._until:
                self._start()
        elif self._server is not None and (code := self._server.exit_code()) is not None:
            self._server_has_ended(code)
        elif self._phase is Phase.STARTING:
            if all(self._api.is_ready(model) for model in self._models):
                self._begin_to_serve()
        elif self._phase is Phase.SERVING:
            self._kill_if_dead()
        elif self._phase is Phase.NOTICE:
            if not self._kill_if_dead() and time.monotonic() >= self._until:
                self._begin_to_unload()
        elif self._phase is Phase.UNLOADING:
            self._unload()
        else:
            self._end()

    # --- The start, and serving

    def _start(self) -> None:
        # The model shows the number in its metric llama_server_restarts.
        environment = self._settings.for_model(os.environ) | {"TRITON_SERVER_RESTARTS": str(self._restarts.total)}
        self._phase = Phase.STARTING
        self._death = None
        remove_shared_memory(self._shm_prefix)
        try:
            self._server = start_server(self._command, environment)
        except OSError as error:  # no memory or no process left
            self._after_death(f"tritonserver can't be started: {error}")
        else:
            self._state.enter("starting", "the model is being loaded", self._server.pid)

    def _begin_to_serve(self) -> None:
        assert self._server is not None
        stuck = self._settings.stuck
        probe, pause = live_probe(self._options.http, self._options.metrics, stuck)
        self._watch = Watch(self._server.pid, probe if stuck else None, pause)
        self._served = True
        self._phase = Phase.SERVING
        self._state.enter("serving", "the model is loaded")

    def _kill_if_dead(self) -> bool:
        """Kill tritonserver if the model is dead; return whether it is."""
        assert self._watch is not None
        death = self._watch.death()
        if death is not None:
            self._kill_dead(death)
        return death is not None

    def _kill_dead(self, reason: str) -> None:
        assert self._server is not None
        self._death = reason
        self._server.kill()

    # --- A death, and what follows

    def _server_has_ended(self, code: int) -> None:
        """Go on after tritonserver has ended; code: 128 + N for signal N."""
        self._clean_up()
        self._server = None
        death = self._death or _describe_end(code)
        if self._phase is Phase.ENDING:
            self._code = self._end_code
        elif self._phase in (Phase.NOTICE, Phase.UNLOADING):
            self._fail(f"{death} before the last request was answered", DEAD)
        elif self._served:
            self._after_death(death)
        elif code - 128 in _CRASHES and not self._start_crashed:
            # It can lose a race of its own there (triton-inference-server/server issue 8882).
            self._start_crashed = True
            say(f"{death} before it was ready; it is started again once")
            self._start()
        else:
            # tritonserver's own last error has the reason.
            self._fail(death, code)

    def _after_death(self, death: str) -> None:
        restart = self._restarts.after_death(time.monotonic())
        if restart is None:
            restarts = f"; restarts so far: {self._restarts.total}" if self._restarts.total else ""
            self._fail(f"{death}{restarts}", DEAD)
            return
        pause, count = restart
        when = f"in {pause:g} s" if pause else "at once"
        reason = f"{death}; tritonserver is started again {when} ({count})"
        say(reason)
        self._state.enter("starting", reason)
        self._phase = Phase.PAUSED
        self._until = time.monotonic() + pause

    def _fail(self, reason: str, code: int) -> None:
        self._state.enter("failed", reason)
        say(f"{reason}; the server ends with code {code}")
        self._code = code

    def _clean_up(self) -> None:
        """Remove what a server has left, however it has ended."""
        if self._watch is not None:
            self._watch.end()
        kill_children()
        remove_shared_memory(self._shm_prefix)

    # --- The drain

    def _begin_to_unload(self) -> None:
        assert self._watch is not None
        self._watch.end()
        self._deadline = time.monotonic() + self._settings.grace + UNLOAD_S
        self._to_unload = list(self._models)
        self._phase = Phase.UNLOADING
        try:
            self._api.unload(self._to_unload[-1])
        except ApiError as error:
            # On a signal Triton also finishes requests, though it waits for idle connections first.
            say(f"the model can't be unloaded ({error}); tritonserver gets SIGINT instead")
            self._end_server(DRAINED, flush=0.0, wait=self._settings.grace + UNLOAD_S)

    def _unload(self) -> None:
        """Wait until the model is unloaded, or everything is answered; then unload the next one, or end."""
        now = time.monotonic()
        try:
            loaded = self._api.is_loaded(self._to_unload[-1])
            if not loaded or self._has_been_idle(now):
                if loaded:
                    # A gRPC stream that its client has left open.
                    say(f"everything is answered, and Triton still holds {self._to_unload[-1]}")
                self._to_unload.pop()
                self._idle_since = None
                if not self._to_unload:
                    self._state.enter("draining", ANSWERED)
                    self._end_server(DRAINED, flush=FLUSH_S, wait=END_S)
                    return
                self._api.unload(self._to_unload[-1])
        except ApiError as error:
            say(f"unloading: {error}")
        self._stop_unloading(now)

    def _has_been_idle(self, now: float) -> bool:
        """Return whether for IDLE_S nothing waits or runs, as Triton's and the model's metrics say."""
        load = None if self._options.metrics is None else read_load(self._options.metrics)
        if load is None or not load.idle:
            self._idle_since = None
            return False
        self._idle_since = self._idle_since or now
        return now - self._idle_since >= IDLE_S

    def _stop_unloading(self, now: float) -> None:
        """End the drain where it can't succeed any more, or the grace period is over."""
        assert self._watch is not None
        self._gone_since = (self._gone_since or now) if self._watch.all_gone() else None
        if self._gone_since is not None and now - self._gone_since > UNLOADS_WITHOUT_PROCESS_S:
            self._kill_dead(f"the model process {self._watch.gone()[0]} ended")
        elif now > self._deadline:
            bound = self._settings.grace + UNLOAD_S
            say(f"the model isn't unloaded within {bound:g} s; requests that still ran are cut off")
            self._end_server(CUT_OFF, flush=0.0, wait=0.0)

    def _end_server(self, code: int, *, flush: float, wait: float) -> None:
        """Tell tritonserver to end after `flush` seconds, and kill it `wait` seconds later. code: the supervisor's."""
        self._end_code = code
        self._phase = Phase.ENDING
        self._until = time.monotonic() + flush
        self._deadline = self._until + wait
        self._interrupted = False

    def _end(self) -> None:
        assert self._server is not None
        now = time.monotonic()
        if not self._interrupted and now >= self._until:
            self._interrupted = True
            self._server.terminate()
        if now >= self._deadline:
            self._server.kill()


def _describe_end(code: int) -> str:
    """Return how tritonserver ended, with the signal's name if it died of one."""
    try:
        return f"tritonserver died of {signal.Signals(code - 128).name}"
    except ValueError:
        return f"tritonserver has ended with code {code}"
