"""The course of a supervised server: it loads, serves while its model lives, and drains.

    starting ── serving ──(end)── notice ── unload ── flush ── SIGTERM
        │          └──(the model is dead)── kill, exit code 70
        └──(end)── SIGTERM: no request was accepted yet

Each state is a generator that is advanced several times a second and yields where it waits. When the model dies,
tritonserver is killed at once: that closes its clients' connections, which Triton itself would leave open for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from triton_llama.health import Address

from triton_supervisor.liveness import Liveness, Pace, Watch, live_probe
from triton_supervisor.loop import Unwatched
from triton_supervisor.process import ServerProcess
from triton_supervisor.repository_api import MODEL, ApiError, NotListeningError, RepositoryApi
from triton_supervisor.settings import CUT_OFF, DEAD, DRAINED, FLUSH_S, UNLOAD_S
from triton_supervisor.sockets import flush
from triton_supervisor.state import StateFile

_LOADING_ENDS_S = 2.0
_UNLOADS_WITHOUT_PROCESS_S = 3.0
"""Triton notices sooner that the process of a model that it unloads has ended."""


class Supervision:
    """A Course. grace: seconds for accepted requests. notice: seconds of serving on before the drain."""

    def __init__(
        self,
        server: ServerProcess,
        api: RepositoryApi,
        watch: Watch,
        state: StateFile,
        say: Callable[[str], None],
        *,
        grace: float,
        notice: float,
    ) -> None:
        self._server = server
        self._api = api
        self._watch = watch
        self._state = state
        self._say = say
        self._grace = grace
        self._notice = notice
        self._ending = False
        self._code: int | None = None
        self._course = self._serve()

    def end(self) -> None:
        """Begin to drain; no effect a second time, or after the model has died."""
        if not self._ending and self._code is None:
            self._ending = True
            self._course = self._drain()

    def advance(self) -> None:
        """Take the next step."""
        self._state.catch_up()
        next(self._course, None)

    def exit_code(self, server_code: int) -> int:
        """Return DRAINED, CUT_OFF or DEAD, or the server's code if it ended by itself."""
        if self._code is None and not self._ending:
            self._state.enter("failed", f"tritonserver has ended with code {server_code}")
        return server_code if self._code is None else self._code

    def _serve(self) -> Iterator[None]:
        while not self._api.model_is_ready():
            self._watch.wait()
            yield
        self._watch.begin()
        self._state.enter("serving", "the model is loaded")
        while not self._dies():
            if self._state.announced():
                self._state.enter("draining", "the end is announced; still serving")
            yield

    def _dies(self) -> bool:
        death = self._watch.death()
        if death is not None:
            self._fail(death)
        return death is not None

    def _fail(self, reason: str) -> None:
        self._say(f"{reason}; the server ends with code {DEAD}")
        self._state.enter("failed", reason)
        self._code = DEAD
        self._server.kill()

    def _drain(self) -> Iterator[None]:
        serving, announced = self._state.condition.state != "starting", self._state.announced()
        self._state.enter("draining", "told to end")
        if serving and not announced:
            until = time.monotonic() + self._notice
            while time.monotonic() < until:
                if self._dies():
                    return
                yield
        self._watch.end()
        deadline = time.monotonic() + self._grace + UNLOAD_S
        try:
            # The one that calls the others first.
            self._api.unload(self._api.models[-1])
        except NotListeningError:
            yield from self._stop_loading() if not serving else self._leave_to_triton("it takes no connections")
        except ApiError as error:
            yield from self._leave_to_triton(str(error))
        else:
            yield from self._unload(deadline)

    def _stop_loading(self) -> Iterator[None]:
        """Before it listens, Triton has accepted no request."""
        self._code = DRAINED
        self._server.terminate()
        until = time.monotonic() + _LOADING_ENDS_S
        while time.monotonic() < until:
            yield
        self._server.kill()

    def _leave_to_triton(self, why: str) -> Iterator[None]:
        """On SIGTERM Triton also finishes requests, though it waits for idle connections first."""
        self._say(f"the model can't be unloaded ({why}); tritonserver gets SIGTERM instead")
        course = Unwatched(self._server, self._grace + UNLOAD_S, self._say)
        course.end()
        while True:
            course.advance()
            yield

    def _unload(self, deadline: float) -> Iterator[None]:
        """Wait until the last accepted request is answered and every model is unloaded, one after the other."""
        *others, model = self._api.models
        gone_since: float | None = None
        last_error = ""
        while True:
            now = time.monotonic()
            try:
                if not self._api.model_is_loaded(model):
                    if not others:
                        break
                    self._api.unload(others[-1])
                    model = others.pop()
                last_error = ""
            except ApiError as error:
                last_error = f"; the last answer to whether it is: {error}"
            # Triton ends instances one after the other, each as slowly as its `finalize`; the remaining ones may still
            # be answering.
            gone_since = (gone_since or now) if self._watch.all_gone() else None
            if gone_since is not None and now - gone_since > _UNLOADS_WITHOUT_PROCESS_S:
                pids = " and ".join(str(pid) for pid in sorted(process.pid for process in self._watch.gone()))
                self._fail(f"the model process {pids} ended before the last request was answered")
                return
            if now > deadline:
                bound = self._grace + UNLOAD_S
                self._say(
                    f"the model isn't unloaded within {bound:g} s{last_error}; requests that still ran are cut off"
                )
                self._code = CUT_OFF
                self._server.kill()
                return
            yield
        self._code = DRAINED
        self._state.enter("draining", "everything that was accepted is answered")
        self._server.terminate()
        # Triton now waits for connections; the kernel sends the bytes without it.
        yield from flush(self._server.pid, max(deadline, time.monotonic() + FLUSH_S))
        self._server.kill()


def supervise(
    server: ServerProcess,
    http: Address,
    metrics: Address | None,
    key: str,
    state: StateFile,
    say: Callable[[str], None],
    *,
    grace: float,
    notice: float,
    stuck: float | None,
    models: Sequence[str] = (MODEL,),
) -> Supervision:
    """Return the course of a server that was started with `control_arguments(key, models)`; starts threads.

    metrics: None when they are off. grace, notice, stuck: seconds, as in Settings; stuck None disables the probes.
    """
    api = RepositoryApi(http, key, models)
    liveness = None
    if stuck is not None:
        pace = Pace.for_verdict_within(stuck)
        liveness = Liveness(live_probe(http, metrics, pace), pace, say)
    watch = Watch(server.pid, api.listens, liveness, say)
    return Supervision(server, api, watch, state, say, grace=grace, notice=notice)
