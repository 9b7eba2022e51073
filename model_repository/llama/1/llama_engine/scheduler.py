"""Who is in the engine, and when: one thread that steps, and rows that enter and leave between two steps.

Rows enter in order of arrival as soon as there is a slot. While there is none they wait here, and whoever submits is
expected to wait with them before it submits more, so that the queue stays Triton's. A row that is cancelled or out of
time while it waits is never computed. Knows tickets and the engine's rows; Triton is behind `Reply`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from llama_engine.delivery import Delivery, Part, Reply
from llama_engine.engine import Engine, Step
from llama_engine.errors import Cancelled, RequestError, Unavailable
from llama_engine.observability.health import Vitals
from llama_engine.observability.stats import Meter
from llama_engine.rows import FAILURE, Row, named
from llama_engine.tickets import Ticket

POLL_SECONDS = 0.02
"""Pause between two rounds of asking whether anybody still wants the answers."""

POLL_SHARE = 5
"""Asking takes at most one of so many parts of the time: every question is a round trip to Triton's process."""

HANG_SECONDS = 10.0
"""How long `stop` waits for a step that should have come back."""

_STOPPING = Unavailable("the server is stopping")

_log = logging.getLogger(__name__)


class Scheduler:
    """Runs an engine in a thread of its own."""

    def __init__(self, engine: Engine, delivery: Delivery, meter: Meter, stuck_seconds: float) -> None:
        """stuck_seconds: how long a step may take before `trouble` calls it stuck; 0 is as long as it likes."""
        self._engine = engine
        self._delivery = delivery
        self._meter = meter
        # Guards all that follows, and is told of every row that comes, enters, ends or is cancelled.
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: dict[Row, Ticket] = {}
        self._cancelled: list[Ticket] = []
        self._drain_until: float | None = None
        self._vitals = Vitals(stuck_seconds)
        self._stepping = threading.Thread(target=self._run, name="engine", daemon=True)
        self._asking = threading.Thread(target=self._watch, name="cancellation", daemon=True)
        self._stepping.start()
        self._asking.start()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Let rows in, behind those that came before."""
        with self._changed:
            self._waiting += tickets
            self._changed.notify_all()
            if self._drain_until is not None:
                # The thread that would answer them may have ended.
                self._close(tickets, _STOPPING)

    def wait_for_seats(self, tickets: Iterable[Ticket]) -> None:
        """Wait until every one of these has its slot, or is sure of one before the next step, or an outcome without.

        Not longer: Triton wakes its batcher for a request only when the model is free to take it, and otherwise looks
        again half a second later.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._all_fit() or all(ticket.left_the_queue for ticket in tickets))

    def wait_for_ends(self, tickets: Iterable[Ticket]) -> None:
        """Wait until every one of these has its outcome."""
        with self._changed:
            self._changed.wait_for(lambda: all(ticket.outcome is not None for ticket in tickets))

    @property
    def failing(self) -> bool:
        """Whether nothing but failures came of the last steps."""
        return self._vitals.failing

    def trouble(self) -> str:
        """Return why a row that came now wouldn't be decoded, in a few words; nothing if it would. Never waits."""
        if self._drain_until is not None:
            return str(_STOPPING)
        return self._vitals.trouble() if self._stepping.is_alive() else "the engine's thread has ended"

    def stop(self, drain_seconds: float) -> None:
        """Let nobody in any more, let running rows finish for so long, answer the others, and end the threads."""
        with self._changed:
            self._drain_until = time.monotonic() + drain_seconds
            self._changed.notify_all()
        self._stepping.join(drain_seconds + HANG_SECONDS)
        if self._stepping.is_alive():
            with self._changed:
                _log.error("a step doesn't come back; its %d rows are answered without it", len(self._running))
                for ticket in [*self._waiting, *self._running.values()]:
                    self._answer(ticket, _STOPPING)
                    self._meter.ended(ticket)
                self._waiting.clear()
                self._running.clear()
        self._asking.join(HANG_SECONDS)

    def _run(self) -> None:
        while True:
            try:
                if not self._round():
                    return
            except Exception:  # noqa: BLE001 - without this thread every client would wait for ever
                _log.exception("scheduling failed; %d running rows are answered with an error", len(self._running))
                self._fail_running()

    def _fail_running(self) -> None:
        try:
            self._vitals.failed()
            self._meter.failed()
            with self._changed:
                self._close(list(self._running.values()), FAILURE)
        except Exception:  # noqa: BLE001 - as above; each try answers at least one row
            _log.exception("answering the running rows failed; %d are left", len(self._running))
        # Without rows there may be no step for long that would note it.
        self._meter.level(len(self._running), len(self._waiting))

    def _round(self) -> bool:
        """Let rows leave and enter, and make a step; return whether there will be another round."""
        with self._changed:
            self._vitals.resting()
            self._changed.wait_for(lambda: self._waiting or self._running or self._drain_until is not None)
            self._vitals.working()
            self._let_go()
            self._let_in()
            # Before the step, so that one that hangs is seen to have rows.
            self._meter.level(len(self._running), len(self._waiting))
            if not self._running:
                return self._drain_until is None
        step = self._engine.step()
        self._report(step)
        self._vitals.stepped(step)
        return True

    def _let_go(self) -> None:
        """Answer whoever is cancelled or out of time."""
        now = time.monotonic()
        self._close(self._cancelled, Cancelled("the request was cancelled"))
        self._cancelled = []
        late = [ticket for ticket in self._waiting if now >= ticket.deadline]
        self._close(late, Unavailable("the request's time was up before it got a slot"))
        if self._drain_until is not None:
            self._close(list(self._waiting), _STOPPING)
            if now >= self._drain_until:
                self._close(list(self._running.values()), _STOPPING)

    def _let_in(self) -> None:
        entered = time.monotonic()
        while self._waiting and self._engine.taken < self._engine.slots:
            ticket = self._waiting.popleft()
            self._running[ticket.row] = ticket
            self._engine.enter(ticket.row)
            ticket.entered = entered
            self._changed.notify_all()

    def _all_fit(self) -> bool:
        return self._drain_until is None and len(self._waiting) <= self._engine.slots - len(self._running)

    def _report(self, step: Step) -> None:
        """Pass on what a step came to."""
        now = time.monotonic()
        with self._changed:
            # Not the rows that `stop` has answered while this step hung.
            for ticket in filter(None, map(self._running.get, step.started)):
                ticket.started = now
            parts = self._pieces()
            ended = [self._running.pop(row) for row in step.ended if row in self._running]
            for ticket in ended:
                assert ticket.row.outcome is not None
                ticket.outcome, ticket.ended = ticket.row.outcome, now
                parts.append((ticket.reply, Part(ticket.index, ticket.outcome)))
            # Together, so that a row's last piece goes out with its outcome.
            self._delivery.post(parts)
            self._changed.notify_all()
            for ticket in ended:
                self._meter.ended(ticket)
            self._meter.stepped(step, now, len(self._running), len(self._waiting))

    def _pieces(self) -> list[tuple[Reply, Part]]:
        """Take what has become certain of the rows that stream; a row whose piece can't be made is answered so."""
        parts: list[tuple[Reply, Part]] = []
        for row, ticket in list(self._running.items()):
            if not ticket.stream or isinstance(row.outcome, RequestError):
                continue
            try:
                piece = row.take()
            except Exception:  # noqa: BLE001 - the row must get an answer, and the others go on
                _log.exception("making a piece of the text of %s failed", named([row]))
                self._meter.failed()
                self._close([ticket], FAILURE)
                continue
            if piece is not None:
                parts.append((ticket.reply, Part(ticket.index, piece)))
        return parts

    def _close(self, tickets: Iterable[Ticket], error: RequestError) -> None:
        """Answer tickets that wait or run, if they still do, with an error."""
        for ticket in tickets:
            if ticket.outcome is None:
                running = self._running.pop(ticket.row, None)
                if running is None:
                    self._waiting.remove(ticket)
                # Answered first: whatever follows may raise.
                self._answer(ticket, error)
                try:
                    if running is not None:
                        self._engine.drop(ticket.row)
                finally:
                    self._meter.ended(ticket)

    def _answer(self, ticket: Ticket, error: RequestError) -> None:
        ticket.outcome, ticket.ended = error, time.monotonic()
        self._delivery.post([(ticket.reply, Part(ticket.index, error))])
        self._changed.notify_all()

    def _watch(self) -> None:
        """Ask for every row whether anybody still wants it."""
        pause = POLL_SECONDS
        while True:
            with self._changed:
                # Nobody notifies of the time: the first wait is the pause, the second one for something to ask about.
                self._changed.wait_for(lambda: self._drain_until is not None and not self._running, pause)
                self._changed.wait_for(lambda: self._waiting or self._running or self._drain_until is not None)
                if self._drain_until is not None and not self._running:
                    return
                tickets = [*self._waiting, *self._running.values()]
            began = time.monotonic()
            gone = {reply for reply in {ticket.reply for ticket in tickets} if _is_cancelled(reply)}
            pause = max(POLL_SECONDS, (POLL_SHARE - 1) * (time.monotonic() - began))
            if gone:
                with self._changed:
                    self._cancelled += [ticket for ticket in tickets if ticket.reply in gone]
                    self._changed.notify_all()


def _is_cancelled(reply: Reply) -> bool:
    try:
        return reply.is_cancelled()
    except Exception:  # noqa: BLE001 - who can't be asked stays, and the others are asked too
        _log.exception("can't tell whether a request was cancelled; it goes on")
        return False
