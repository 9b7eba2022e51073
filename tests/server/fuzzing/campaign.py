"""Attacks on a server over several connections at a time, with valid requests in between."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from server.fuzzing.attack import GONE, HUNG
from server.fuzzing.sending import Attack, send
from server.fuzzing.verdict import fault
from triton_local.server import LocalTriton

WORKERS = 8
"""Connections at a time, to each server."""

GOOD_EVERY = 20
"""One request in 20 is a valid one."""

MOST_HUNG = 3
"""Attacks that hang before the campaign ends: each takes a minute, and a few show the cause."""

_REMEMBERED = 3 * WORKERS
"""Attacks that a report names when the server has gone: one may have broken what the next one met."""

Good = tuple[Callable[[], object], object]
"""A valid request and the answer it gets alone."""


def by_fault(faults: Sequence[tuple[Attack, str]]) -> dict[str, list[Attack]]:
    """Return the attacks of each fault, in the order in which the faults were found."""
    found: dict[str, list[Attack]] = {}
    for attack, wrong in faults:
        found.setdefault(wrong, []).append(attack)
    return found


@dataclass
class Campaign:
    """Attacks on one server. good: requests sent in between, in turn. outcomes: by route and status.

    faults: attacks with what was wrong. spoiled: good requests' other answers. gone: the attacks sent last before the
    server had gone.
    """

    server: LocalTriton
    good: Sequence[Good]
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: int = 0
    asked: int = 0
    faults: list[tuple[Attack, str]] = field(default_factory=list)
    spoiled: list[str] = field(default_factory=list)
    gone: Sequence[Attack] = ()
    _last: list[Attack] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, attacks: Sequence[Attack]) -> None:
        """Send them all; the rest is dropped once the server is gone or hangs repeatedly."""
        with grpc.insecure_channel(self.server.grpc_url) as channel, ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda attack: self._send(attack, channel), attacks))

    @property
    def ended(self) -> bool:
        """Whether the server is gone or hangs repeatedly."""
        return bool(self.gone) or sum(what == HUNG for _, what in self.faults) >= MOST_HUNG

    def by_route(self) -> dict[str, dict[str, int]]:
        """Return the number of attacks by route and status."""
        routes = sorted({route for route, _ in self.outcomes})
        return {
            route: {status: count for (of, status), count in sorted(self.outcomes.items()) if of == route}
            for route in routes
        }

    def _send(self, attack: Attack, channel: grpc.Channel) -> None:
        if self.ended:
            return
        with self._lock:
            self.sent += 1
            number = self.sent
            self._last = [*self._last[1 - _REMEMBERED :], attack]
        outcome = send(self.server, channel, attack)
        wrong = fault(attack, outcome)
        with self._lock:
            self.outcomes[attack.route, outcome.status] += 1
            if wrong == GONE or self.server.exit_code is not None:
                self.gone = self.gone or tuple(self._last)
            elif wrong is not None:
                self.faults.append((attack, wrong))
        if number % GOOD_EVERY == 0 and not self.gone:
            self._ask(number // GOOD_EVERY)

    def _ask(self, number: int) -> None:
        ask, expected = self.good[number % len(self.good)]
        try:
            answer = ask()
        except Exception as error:  # noqa: BLE001 - any error spoils this request only
            answer = error
        with self._lock:
            self.asked += 1
            self.spoiled += [] if answer == expected else [f"{answer!r} instead of {expected}"]
