"""The course of a supervised server: it loads, serves while its model lives, and drains.

    starting ── serving ──(end)── notice ── unload ── flush ── SIGKILL
        │          └──(the model is dead)── kill: the life ends, and another may follow (`restarting`)
        └──(end)── SIGINT: no request was accepted yet

Each state is a generator that is advanced several times a second and yields where it waits. When the model dies,
tritonserver is killed at once: that closes its clients' connections, which Triton itself would leave open for ever.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from triton_llama.health import Address

from triton_supervisor.answers import Answers
from triton_supervisor.life import Outcome, Unwatched, describe_end, is_crash
from triton_supervisor.liveness import Liveness, Pace, Watch, live_probe
from triton_supervisor.process import ServerProcess
from triton_supervisor.repository_api import ApiError, NotListeningError, RepositoryApi
from triton_supervisor.settings import CUT_OFF, DEAD, DRAINED, FLUSH_S, UNLOAD_S
from triton_supervisor.sockets import flush, taken_bytes
from triton_supervisor.state import StateFile

_LOADING_ENDS_S = 2.0
_READ_AT_ONCE_BYTES = 4096
"""A client of a gRPC stream that has taken no more than this during the drain isn't behind: it is some ten deltas, or
HTTP/2's own frames."""
_WRITES_S = 2.0
"""For the last traces."""
_UNLOADS_WITHOUT_PROCESS_S = 3.0
"""Triton notices sooner that the process of a model that it unloads has ended."""


@dataclass(frozen=True, kw_only=True)
class SupervisedServer:
    """What is known of a server that was started with `control_arguments(key, models)`, and the times it is given.

    metrics: None when they are off. key: of its repository API. shm_prefix: as in `prefix_argument` and
    `counts_environment`, which it was started with, too. grace: seconds for accepted requests. notice: seconds of
    serving on before the drain. stuck: seconds, as in Settings; None disables the probes.
    """

    http: Address
    metrics: Address | None
    key: str
    shm_prefix: str
    grace: float
    notice: float
    stuck: float | None
    models: Sequence[str]


class Supervision:
    """A LifeCourse; it starts threads."""

    def __init__(
        self, server: ServerProcess, supervised: SupervisedServer, state: StateFile, say: Callable[[str], None]
    ) -> None:
        http, metrics = supervised.http, supervised.metrics
        self._server = server
        self._api = RepositoryApi(http, supervised.key, supervised.models)
        liveness = None
        if supervised.stuck is not None:
            pace = Pace.for_verdict_within(supervised.stuck)
            liveness = Liveness(live_probe(http, metrics, pace), pace, say)
        self._watch = Watch(server.pid, self._api.listens, liveness, say)
        self._answers = Answers(supervised.shm_prefix, metrics)
        self._state = state
        self._say = say
        self._grace = supervised.grace
        self._notice = supervised.notice
        # On Triton's other ports are gRPC's streams.
        self._http_ports = {http.port} if metrics is None else {http.port, metrics.port}
        self._ending = False
        # By the connection's inode, when the drain began.
        self._taken_before: Mapping[int, int] = {}
        self._untold = False
        self._code: int | None = None
        self._served = False
        self._death: str | None = None
        # The course that ends it when the model can't be unloaded.
        self._unwatched: Unwatched | None = None
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

    def outcome(self, server_code: int) -> Outcome:
        """Return an outcome with the code DRAINED, CUT_OFF or DEAD, or the server's if it ended by itself."""
        self._watch.end()
        if self._code is not None:
            return Outcome(self._code, self._death, self._served)
        asked = self._ending and not self._died_while_ending(server_code)
        return Outcome(server_code, None if asked else describe_end(server_code), self._served)

    def _died_while_ending(self, server_code: int) -> bool:
        killed = self._unwatched is not None and self._unwatched.killed
        return is_crash(server_code) or (server_code == 128 + signal.SIGKILL and not killed)

    def _serve(self) -> Iterator[None]:
        while not self._api.model_is_ready():
            self._watch.wait()
            yield
        self._watch.begin()
        self._served = True
        self._state.enter("serving", "the model is loaded")
        while not self._dies():
            # Before a look at the announcement: "serving" is what a launcher waits for.
            yield
            if self._state.announced():
                self._state.enter("draining", "the end is announced; still serving")

    def _dies(self) -> bool:
        death = self._watch.death()
        if death is not None:
            self._fail(death)
        return death is not None

    def _fail(self, reason: str) -> None:
        self._death = reason
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
        self._taken_before = self._taken_of_streams()
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
        """On a signal Triton also finishes requests, though it waits for idle connections first."""
        self._say(f"the model can't be unloaded ({why}); tritonserver gets SIGINT instead")
        self._unwatched = course = Unwatched(self._server, self._grace + UNLOAD_S, self._say)
        course.end()
        while True:
            course.advance()
            yield

    def _unload(self, deadline: float) -> Iterator[None]:
        """Wait until the last accepted request is answered and every model is unloaded, one after the other.

        A model that has answered everything, and that Triton still holds, counts as unloaded.
        """
        *others, model = self._api.models
        held: list[str] = []
        gone_since: float | None = None
        last_error = ""
        while True:
            now = time.monotonic()
            try:
                loaded = self._api.model_is_loaded(model)
                if loaded and self._answers.settled(model):
                    held.append(model)
                if not loaded or model in held:
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
        if held:
            self._say(
                f"everything that was accepted is answered, and Triton still holds {' and '.join(held)}: it keeps the "
                "first request of a gRPC stream that its client left open; the server ends without unloading"
            )
        yield from self._flush(deadline, held)

    def _flush(self, deadline: float, held: Sequence[str]) -> Iterator[None]:
        """Wait until the last bytes are with the clients, and end Triton.

        Meanwhile it refuses new requests with a reason. On a signal it closes their connections without a word, and
        waits for idle ones; so it gets one only if it has traces to write.
        """
        self._code = DRAINED
        self._state.enter("draining", "everything that was accepted is answered")
        while True:
            until = max(deadline, time.monotonic() + FLUSH_S)
            yield from flush(self._server.pid, until, self._streams_are_read if held else lambda: False)
            if time.monotonic() > deadline or not any(self._answers.are_due(model) for model in held):
                break
        if self._server.writes_at_its_end:
            self._server.terminate()
            until = time.monotonic() + _WRITES_S
            while time.monotonic() < until:
                yield
        self._server.kill()

    def _streams_are_read(self) -> bool:
        """Return whether a client that got responses over gRPC during the drain is still connected."""
        before = self._taken_before
        taken = self._taken_of_streams().items()
        return any(now - before.get(inode, 0) > _READ_AT_ONCE_BYTES for inode, now in taken)

    def _taken_of_streams(self) -> Mapping[int, int]:
        try:
            return taken_bytes(self._server.pid, self._http_ports)
        except OSError as error:
            if not self._untold:
                self._say(f"who still reads a gRPC stream is unknown, so none is waited for: {error}")
            self._untold = True
            return {}
