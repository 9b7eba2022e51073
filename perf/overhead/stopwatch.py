"""A stopwatch around methods of other code: the time of each, by caller, as a tree of parts.

    with stopwatch("all", [(Sampler, "sample", "sampling")], settle) as whole:
        engine.generate(requests)

Methods are replaced from outside and restored afterwards. A timed call costs about a microsecond, most of it counted to
its caller; `account` measures with and without. Not thread-safe: it measures one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from perf.report.results import Part

Probe = tuple[object, str, str]
"""A method or function to time: a class or module, its attribute, and the part for its time."""


def settle(device: torch.device) -> None:
    """Wait for the device's outstanding work; a CPU has none when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


@contextmanager
def stopwatch(name: str, probes: Iterable[Probe], settle: Callable[[], None]) -> Iterator[Node]:
    """Time the block as a whole of that name, and in it every call of the probed methods as a part of its caller.

    settle: waits for the device, so that its time counts to the right part.
    """
    whole = Node(name)
    opened = [whole]

    def timing(original: Callable[..., object], part: str) -> Callable[..., object]:
        def timed(*arguments: object, **named: object) -> object:
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

    with ExitStack() as replaced:
        for owner, attribute, part in probes:
            replaced.enter_context(patch.object(owner, attribute, timing(vars(owner)[attribute], part)))
        settle()
        began = time.perf_counter()
        yield whole
        settle()
        whole.seconds = time.perf_counter() - began
