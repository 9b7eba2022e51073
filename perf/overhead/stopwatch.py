"""A stopwatch around methods of other people's code: how long each takes, apart by who called it.

    with stopwatch.on([Probe(Sampler, "sample", "sampling")]), stopwatch.running():
        engine.complete(requests)

Methods are replaced from outside and put back afterwards. Every timed call costs about a microsecond, most of which
falls to its caller; whoever reports the parts says what the timing cost in all (`bare.py` runs both with and without).
Not thread-safe: one thread is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from perf.overhead.parts import Node


@dataclass(frozen=True)
class Probe:
    """A method or function to be timed: an attribute of a class or module, and the part that its time goes to."""

    owner: object
    attribute: str
    part: str


class Stopwatch:
    """Times a whole and its parts. settle: waits for what the device still does, so that its time goes to its part."""

    def __init__(self, whole: str, settle: Callable[[], None]) -> None:
        self.whole = Node(whole)
        self._settle = settle
        # Where calls are counted at the moment; empty while nothing is measured.
        self._open: list[Node] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block as the whole."""
        self._open = [self.whole]
        self._settle()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._settle()
            self.whole.seconds += time.perf_counter() - began
            self._open = []

    @contextmanager
    def on(self, probes: Iterable[Probe]) -> Iterator[None]:
        """Time these for as long as the block lasts, wherever they are called from while the stopwatch runs."""
        with ExitStack() as replaced:
            for probe in probes:
                replaced.enter_context(replacing(probe.owner, probe.attribute, self._timing(probe.part)))
            yield

    def _timing(self, part: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
        settle = self._settle

        def timing(original: Callable[..., object]) -> Callable[..., object]:
            def timed(*arguments: object, **named: object) -> object:
                opened = self._open
                if not opened:
                    return original(*arguments, **named)
                node = opened[-1].part(part)
                opened.append(node)
                settle()
                began = time.perf_counter()
                try:
                    return original(*arguments, **named)
                finally:
                    settle()
                    node.seconds += time.perf_counter() - began
                    node.calls += 1
                    opened.pop()

            return timed

        return timing


@contextmanager
def replacing(
    owner: object, attribute: str, wrap: Callable[[Callable[..., object]], Callable[..., object]]
) -> Iterator[None]:
    """Put a wrapped version in the place of an owner's method for as long as the block lasts."""
    original = vars(owner)[attribute]
    setattr(owner, attribute, wrap(original))
    try:
        yield
    finally:
        setattr(owner, attribute, original)
