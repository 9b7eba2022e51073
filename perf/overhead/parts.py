"""A tree of times: what a whole is made of, as it stands in a result's file, and as a table.

A part's name is its path, so that the same work at two places has two names; its parent is the path above. A whole's
parent is empty. Shares are of the whole. What is left of a part beside its own parts is one of them: "the rest of …",
so the parts of a part always add up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

UNITS = {
    "bare engine": "s of one run",
    "mean request": "s of one request",
    "cores": "core seconds of one run",
}
"""What the seconds of each whole of an account are: they can't be compared with another whole's."""


class PartJSON(TypedDict):
    """A part in a result's file. per_token_us: microseconds for each output token that the whole made."""

    name: str
    parent: str
    seconds: float
    share: float
    per_token_us: float


@dataclass
class Node:
    """A part being measured. seconds: with all that is inside of it. rest: what to call the time beside its parts."""

    name: str
    rest: str = ""
    seconds: float = 0.0
    calls: int = 0
    parts: dict[str, Node] = field(default_factory=dict)

    def part(self, name: str) -> Node:
        """Return the part of that name, made if there is none yet."""
        found = self.parts.get(name)
        if found is None:
            found = self.parts[name] = Node(name)
        return found

    def take(self, name: str, seconds: float) -> Node:
        """Give so much time to the part of that name, and return it."""
        found = self.part(name)
        found.seconds += seconds
        return found


def flatten(whole: Node, tokens: float) -> list[PartJSON]:
    """Return a tree's parts, the whole first, each behind its parent and the larger ones first; tokens: it made."""
    return _flatten(whole, "", whole.seconds, tokens)


def _flatten(node: Node, parent: str, total: float, tokens: float) -> list[PartJSON]:
    name = f"{parent}/{node.name}" if parent else node.name
    found: list[PartJSON] = [
        {
            "name": name,
            "parent": parent,
            "seconds": round(node.seconds, 6),
            "share": round(node.seconds / total, 5),
            "per_token_us": round(1e6 * node.seconds / tokens, 3),
        }
    ]
    parts = list(node.parts.values())
    if parts:
        left = node.seconds - sum(part.seconds for part in parts)
        parts.append(Node(node.rest or f"the rest of {node.name}", seconds=left))
    for part in sorted(parts, key=lambda part: -part.seconds):
        found += _flatten(part, name, total, tokens)
    return found


def unit(part: PartJSON) -> str:
    """Return what a part's seconds are."""
    return UNITS.get(part["name"].split("/")[0], "s")


def table(parts: Sequence[PartJSON]) -> str:
    """Return the parts as a Markdown table, each indented below its parent."""
    lines = ["| where the time goes | time | share | µs per token |", "|---|---:|---:|---:|"]
    for part in parts:
        depth, label = part["name"].count("/"), part["name"].rsplit("/", 1)[-1]
        lines.append(
            f"| {'&emsp;' * depth}{label} | {part['seconds']:.3f} {unit(part)} | {100 * part['share']:.1f} % | "
            f"{part['per_token_us']:,.1f} |"
        )
    return "\n".join(lines)
