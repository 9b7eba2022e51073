"""A stopwatch around methods of other code: the time of each, by caller, as a tree of parts.

    with stopwatch.on([Probe(Sampler, "sample", "sampling")]), stopwatch.running():
        engine.generate(requests)

Methods are replaced from outside and restored afterwards. A timed call costs about a microsecond, most of it counted to
its caller; `account` measures with and without. Not thread-safe: it measures one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from perf.report.results import Part


@dataclass
class Node:
    """A part being measured. seconds: including its parts. rest: the name of the time outside its parts."""

    name: str
    rest: str = ""
    seconds: float = 0.0
    calls: int = 0
    parts: dict[str, Node] = field(default_factory=dict)

    def part(self, name: str) -> Node:
        """Return the part of that name, created if missing."""
        return self.parts.setdefault(name, Node(name))

    def take(self, name: str, seconds: float) -> Node:
        """Add time to the part of that name; return the part."""
        found = self.part(name)
        found.seconds += seconds
        return found


def flatten(whole: Node, tokens: float) -> list[Part]:
    """Return a tree's parts, each after its parent and larger ones first; tokens: generated during the whole.

    The time outside a part's parts is one of them ("the rest of …"), so parts always add up.
    """

    def flat(node: Node, parent: str) -> Iterator[Part]:
        name = f"{parent}/{node.name}" if parent else node.name
        share = round(node.seconds / whole.seconds, 5)
        yield Part(name, parent, round(node.seconds, 6), share, round(1e6 * node.seconds / tokens, 3))
        parts = list(node.parts.values())
        if parts:
            left = node.seconds - sum(part.seconds for part in parts)
            parts.append(Node(node.rest or f"the rest of {node.name}", seconds=left))
        for part in sorted(parts, key=lambda part: -part.seconds):
            yield from flat(part, name)

    return list(flat(whole, ""))


@dataclass(frozen=True)
class Probe:
    """A method or function to time: an attribute of a class or module, and the part for its time."""

    owner: object
    attribute: str
    part: str


class Stopwatch:
    """Times a whole and its parts. settle: waits for the device, so that its time counts to the right part."""

    def __init__(self, whole: str, settle: Callable[[], None]) -> None:
        self.whole = Node(whole)
        self._settle = settle
        # The parts that are open now; empty while nothing is measured.
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
        """Time these methods during the block, whenever the stopwatch is running."""
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
    """Replace an owner's method by a wrapped version during the block."""
    original = vars(owner)[attribute]
    setattr(owner, attribute, wrap(original))
    try:
        yield
    finally:
        setattr(owner, attribute, original)
