"""The fenced blocks of README.md, and which of them a test can run.

A block is run where it talks to a server that is already there; one that builds, clones or stays up is checked by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"

# What sets something up, or stays in the foreground: not for a test that has a server already.
_SETS_UP = re.compile(r"\b(make|docker|git|kubectl|pip|cd|bash|python -m triton_local)\b|\.ci/run")
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the README its text begins on."""

    language: str
    text: str
    line: int

    @property
    def sets_up(self) -> bool:
        """Whether it builds, fetches or starts something itself."""
        return self.language == "bash" and _SETS_UP.search(self.text) is not None

    @property
    def asks_a_server(self) -> bool:
        """Whether it can be run as it is against a server on the default ports."""
        return self.language == "python" or (self.language == "bash" and not self.sets_up)

    @property
    def streams(self) -> bool:
        """Whether the server that it asks has to be a streaming one."""
        return re.search(r"stream|\bchat\b", self.text) is not None

    def __str__(self) -> str:
        return f"{self.language}-line-{self.line}"


def blocks(readme: str) -> list[Block]:
    """Return every fenced block of a Markdown text, in order."""
    return [
        Block(match["language"], match["text"], readme.count("\n", 0, match.start("text")) + 1)
        for match in _FENCE.finditer(readme)
    ]


def readme_blocks() -> list[Block]:
    """Return the blocks of README.md."""
    return blocks(README.read_text())
