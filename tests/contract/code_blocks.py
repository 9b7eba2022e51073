"""Fenced code blocks of the Markdown pages, and which of them a test can run.

A block runs if it calls a server that is already up. A block that builds, clones or stays in the foreground does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]

# Commands that set something up or stay in the foreground: a test has a server already.
_SETS_UP = re.compile(r"\b(make|docker|git|kubectl|pip|cd|bash|python -m triton_local)\b|\.ci/run")
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its language, its text, and the line of the page that its text begins on."""

    page: str
    language: str
    text: str
    line: int

    @property
    def sets_up(self) -> bool:
        """Whether the block builds, downloads or starts something."""
        return self.language == "bash" and _SETS_UP.search(self.text) is not None

    @property
    def calls_a_server(self) -> bool:
        """Whether the block runs unmodified against a server on the default ports."""
        return self.language == "python" or (self.language == "bash" and not self.sets_up)

    @property
    def streams(self) -> bool:
        """Whether the block needs a streaming server."""
        return re.search(r"stream|\bchat\b", self.text) is not None

    def __str__(self) -> str:
        return f"{self.page}-{self.language}-line-{self.line}"


def blocks(text: str, page: str = "") -> list[Block]:
    """Return every fenced block of a Markdown text, in order."""
    return [
        Block(page, match["language"], match["text"], text.count("\n", 0, match.start("text")) + 1)
        for match in _FENCE.finditer(text)
    ]


def page_blocks() -> list[Block]:
    """Return the blocks of README.md and of the pages under docs/."""
    return [block for page in PAGES for block in blocks(page.read_text(), page.stem)]
