"""The supervisor of one tritonserver: starts it, watches its model, starts it again when it has died, and drains it.

    STARTING ── SERVING ──(signal)── NOTICE ── UNLOADING ── ENDING ── the end
        │  ▲       └──(dead)── PAUSED ──▶ STARTING, or the end with code 70 after too many deaths
        └──┴───(signal)── ENDING: no request was accepted yet

When the model dies, tritonserver is killed at once: that closes its clients' connections, which Triton itself would
leave open for ever.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from enum import Enum, auto

from triton_supervisor.hardening import new_key
from triton_supervisor.metrics_page import read_load
from triton_supervisor.plan import Plan
from triton_supervisor.process import ServerProcess, kill_children, start_server
from triton_supervisor.repository_api import ApiError, NotListeningError, RepositoryApi, control_arguments
from triton_supervisor.restarts import Restarts
from triton_supervisor.settings import CUT_OFF, DEAD, DRAINED, RESTARTS_VARIABLE, UNLOAD_S
from triton_supervisor.shared_memory import remove_shared_memory
from triton_supervisor.signals import END, KILL, wait_for_signal
from triton_supervisor.state import StateFile
from triton_supervisor.watch import Pace, Probes, Watch, live_probe

NAME = "triton_supervisor"
IDLE_S = 2.0
"""So long nothing must wait or run until a model that Triton still holds counts as unloaded: a request on its way from
Triton's queue to the model is in neither metric for a moment, and the model's own are 0.2 s old."""
FLUSH_S = 2.0
"""For clients to read the last bytes, before tritonserver is told to end."""
END_S = 2.0
"""For tritonserver to end by itself: it waits for idle connections, and writes its traces."""
UNLOADS_WITHOUT_PROCESS_S = 3.0
"""Triton notices sooner that the process of a model that it unloads has ended."""

_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_KILLED = 128 + signal.SIGKILL


class Phase(Enum):
    """What the supervisor does at the moment."""

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


class Supervisor:
    """Runs a plan. Not thread-safe; `block_signals` must have been called."""

    def __init__(self, plan: Plan, state: StateFile, say: Callable[[str], None]) -> None:
        """say: takes lines for the operator."""
        self._plan = plan
        self._state = state
        self._say = say
        self._key = new_key()
        self._api = RepositoryApi(plan.http, self._key, plan.models)
        self._restarts = Restarts(plan.restarts, plan.restart_minutes)
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
        try:
            self._start()
            while self._code is None:
                number = wait_for_signal()
                if number == KILL:
                    self._code = _KILLED
                elif number in END or self._parent_is_gone():
                    self._request_end()
                if self._code is None:
                    self._advance()
            return self._code
        finally:
            self._clean_up()

    def _parent_is_gone(self) -> bool:
        return self._plan.parent is not None and os.getppid() != self._plan.parent

    def _request_end(self) -> None:
        """Begin the shutdown; no effect a second time."""
        if self._phase is Phase.PAUSED:
            self._code = DRAINED
        elif self._phase is Phase.STARTING:
            self._state.enter("draining", "told to end")
            # Before it listens, Triton has accepted no request.
            self._end_server(DRAINED, flush=0.0, wait=END_S)
        elif self._phase is Phase.SERVING:
            announced = self._state.announced()
            self._state.enter("draining", "told to end")
            self._phase = Phase.NOTICE
            self._until = time.monotonic() + (0.0 if announced else self._plan.notice)

    def _advance(self) -> None:
        """Take the next step without blocking for long."""
        self._state.catch_up()
        if self._phase is Phase.PAUSED:
            if time.monotonic() >= self._until:
                self._start()
        elif self._server is not None and (code := self._server.exit_code()) is not None:
            self._server_has_ended(code)
        elif self._phase is Phase.STARTING:
            if self._api.model_is_ready():
                self._begin_to_serve()
        elif self._phase is Phase.SERVING:
            self._serve()
        elif self._phase is Phase.NOTICE:
            if not self._model_is_dead() and time.monotonic() >= self._until:
                self._begin_to_unload()
        elif self._phase is Phase.UNLOADING:
            self._unload()
        else:
            self._end()

    # --- The start, and serving

    def _start(self) -> None:
        plan = self._plan
        # In front: an option without its value would consume what follows.
        program, *options = plan.arguments
        arguments = [program, *control_arguments(self._key, plan.models), *options]
        environment = {**plan.environment, RESTARTS_VARIABLE: str(self._restarts.total)}
        self._phase = Phase.STARTING
        self._death = None
        try:
            self._server = start_server(arguments, NAME, environment)
        except OSError as error:  # no memory or no process left
            self._server = None
            self._after_death(f"tritonserver can't be started: {error}")
        else:
            self._state.enter("starting", "the model is being loaded", self._server.pid)

    def _begin_to_serve(self) -> None:
        plan, server = self._plan, self._server
        assert server is not None
        probes = None
        if plan.stuck > 0:
            pace = Pace.for_verdict_within(plan.stuck)
            probes = Probes(live_probe(plan.http, plan.metrics, pace), pace, self._say)
        self._watch = Watch(server.pid, probes)
        self._served = True
        self._phase = Phase.SERVING
        self._state.enter("serving", "the model is loaded", server.pid)

    def _serve(self) -> None:
        if not self._model_is_dead() and self._state.announced():
            self._state.enter("draining", "the end is announced; still serving")

    def _model_is_dead(self) -> bool:
        """Return whether the model is dead; tritonserver is killed then."""
        assert self._watch is not None
        death = self._watch.death()
        # A tritonserver that another process has terminated closes its port first, and then ends the model itself.
        if death is None or not self._api.listens():
            return False
        self._kill_dead(death)
        return True

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
        elif self._served and code == 0 and self._death is None:
            self._say(f"{death}: another process has ended it")
            self._code = DRAINED
        elif self._served:
            self._after_death(death)
        elif code - 128 in _CRASHES and not self._start_crashed:
            # It can lose a race of its own there (triton-inference-server/server issue 8882).
            self._start_crashed = True
            self._say(f"{death} before it was ready; it is started again once")
            self._start()
        else:
            # tritonserver's own last error has the reason.
            self._fail(death, code)

    def _after_death(self, death: str) -> None:
        restart = self._restarts.after_death()
        if restart is None:
            restarts = f"; restarts so far: {self._restarts.total}" if self._restarts.total else ""
            self._fail(f"{death}{restarts}", DEAD)
            return
        when = "at once" if restart.pause == 0 else f"in {restart.pause:g} s"
        reason = f"{death}; tritonserver is started again {when} ({restart})"
        self._say(reason)
        self._state.enter("starting", reason)
        self._phase = Phase.PAUSED
        self._until = time.monotonic() + restart.pause

    def _fail(self, reason: str, code: int) -> None:
        self._state.enter("failed", reason)
        self._say(f"{reason}; the server ends with code {code}")
        self._code = code

    def _clean_up(self) -> None:
        """Remove what a server has left, however it has ended."""
        if self._watch is not None:
            self._watch.end()
        kill_children()
        remove_shared_memory(self._plan.shm_prefix)

    # --- The drain

    def _begin_to_unload(self) -> None:
        assert self._watch is not None
        self._watch.end()
        self._deadline = time.monotonic() + self._plan.grace + UNLOAD_S
        self._to_unload = list(self._plan.models)
        self._phase = Phase.UNLOADING
        try:
            self._api.unload(self._to_unload[-1])
        except ApiError as error:
            # On a signal Triton also finishes requests, though it waits for idle connections first.
            self._say(f"the model can't be unloaded ({error}); tritonserver gets SIGINT instead")
            self._end_server(DRAINED, flush=0.0, wait=self._plan.grace + UNLOAD_S)

    def _unload(self) -> None:
        """Wait until the model is unloaded, or everything is answered; then unload the next one, or end."""
        now = time.monotonic()
        try:
            loaded = self._api.model_is_loaded(self._to_unload[-1])
            if not loaded or self._has_been_idle(now):
                if loaded:
                    # A gRPC stream that its client has left open.
                    self._say(f"everything is answered, and Triton still holds {self._to_unload[-1]}")
                self._to_unload.pop()
                self._idle_since = None
                if not self._to_unload:
                    self._state.enter("draining", "everything that was accepted is answered")
                    self._end_server(DRAINED, flush=FLUSH_S, wait=END_S)
                    return
                self._api.unload(self._to_unload[-1])
        except NotListeningError:
            return  # its end is noticed next
        except ApiError as error:
            self._say(f"unloading: {error}")
        self._stop_unloading(now)

    def _has_been_idle(self, now: float) -> bool:
        """Return whether for IDLE_S nothing waits or runs, as Triton's and the model's metrics say."""
        load = None if self._plan.metrics is None else read_load(self._plan.metrics)
        if load is None or not load.idle:
            self._idle_since = None
            return False
        self._idle_since = self._idle_since or now
        return now - self._idle_since >= IDLE_S

    def _stop_unloading(self, now: float) -> None:
        """End the drain where it can't succeed any more, or the grace period is over."""
        assert self._watch is not None
        assert self._server is not None
        self._gone_since = (self._gone_since or now) if self._watch.all_gone() else None
        if self._gone_since is not None and now - self._gone_since > UNLOADS_WITHOUT_PROCESS_S:
            self._kill_dead(f"the model process {self._watch.gone()[0]} ended")
        elif now > self._deadline:
            bound = self._plan.grace + UNLOAD_S
            self._say(f"the model isn't unloaded within {bound:g} s; requests that still ran are cut off")
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
