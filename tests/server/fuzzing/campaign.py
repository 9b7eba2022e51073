"""Attacks on servers over several connections at a time, with valid requests in between.

Hypothesis generates them in one thread while others send them to every server. The same seed and source give the same
attacks (Hypothesis uses constants of the loaded modules). Nothing is shrunk, because a crashed server can't be asked
again; the report has the attacks under way instead.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from server.clients import Answer
from server.fuzzing.sending import Attack, Sender
from triton_local.server import LocalTriton

WORKERS = 8
"""Connections at a time, to each server."""

GOOD_EVERY = 20
"""One request in 20 is a valid one."""

MOST_HUNG = 3
"""Attacks that hang before the campaign ends: each takes a minute, and a few show the cause."""

_REMEMBERED = 3
"""Attacks of each worker that a report names when the server has gone: one may have broken what the next one met."""


@dataclass(frozen=True)
class Good:
    """A valid request and its known answer."""

    ask: Callable[[], Answer]
    answer: Answer


@dataclass
class Report:
    """Result of a campaign. outcomes: by kind and status. hung, spoiled, before_it_was_gone: findings."""

    outcomes: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    good: int = 0
    hung: list[Attack] = field(default_factory=list)
    spoiled: list[str] = field(default_factory=list)
    before_it_was_gone: list[Attack] = field(default_factory=list)

    def line(self) -> str:
        """Return the outcomes, for the end of a run."""
        outcomes = ", ".join(f"{count} {said}" for said, count in sorted(self.outcomes.items()))
        return f"{self.sent} attacks and {self.good} good requests: {outcomes}"


class Campaign:
    """Attacks one server inside the block. good: requests sent in between, in turn."""

    def __init__(self, server: LocalTriton, good: Sequence[Good]) -> None:
        self._server = server
        self._good = good
        self._attacks: queue.Queue[Attack | None] = queue.Queue(2 * WORKERS)
        self._gone = threading.Event()
        # It has gone, or hangs again and again.
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._workers = [threading.Thread(target=self._work, name=f"fuzzing-{index}") for index in range(WORKERS)]
        self.report = Report()

    def __enter__(self) -> Campaign:
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait until every attack is sent."""
        for _ in self._workers:
            self._attacks.put(None)
        for worker in self._workers:
            worker.join()

    def put(self, attack: Attack) -> None:
        """Queue an attack for the next free connection; dropped once the server is gone or hangs repeatedly."""
        if not self._over.is_set():
            self._attacks.put(attack)

    def _work(self) -> None:
        sender = Sender(self._server)
        last: deque[Attack] = deque(maxlen=_REMEMBERED)
        try:
            # Until the end, also when it is over, or `put` would block.
            while (attack := self._attacks.get()) is not None:
                if not self._over.is_set():
                    self._send(sender, attack, last)
        finally:
            sender.close()

    def _send(self, sender: Sender, attack: Attack, last: deque[Attack]) -> None:
        last.append(attack)
        outcome = sender.send(attack)
        with self._lock:
            self.report.sent += 1
            self.report.outcomes[f"{outcome.kind} {outcome.said}".strip()] += 1
            good = self._good[self.report.sent // GOOD_EVERY % len(self._good)]
            asks = self.report.sent % GOOD_EVERY == 0
            if outcome.kind == "hung":
                self.report.hung.append(attack)
            if len(self.report.hung) >= MOST_HUNG:
                self._over.set()
        if outcome.kind == "gone" or self._server.exit_code is not None:
            self._gone.set()
            self._over.set()
        elif asks:
            self._ask(good)
        if self._gone.is_set():
            with self._lock:
                self.report.before_it_was_gone += last

    def _ask(self, good: Good) -> None:
        try:
            answer = good.ask()
        except Exception as error:  # noqa: BLE001 - any error spoils this request only
            spoiled = f"{type(error).__name__}: {error}"
        else:
            spoiled = "" if answer == good.answer else f"{answer} instead of {good.answer}"
        with self._lock:
            self.report.good += 1
            if spoiled:
                self.report.spoiled.append(spoiled)


def attack(campaigns: Sequence[Campaign], attacks: SearchStrategy[Attack], count: int, number: int) -> None:
    """Put that many attacks into each campaign. number: the seed."""

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(attacks)
    def put(one: Attack) -> None:
        for campaign in campaigns:
            campaign.put(one)

    put()
