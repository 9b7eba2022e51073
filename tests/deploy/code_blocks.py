"""Fenced code blocks and tables of the Markdown pages, and which blocks a test can run.

A block runs if it calls a server that is already up. A block that builds, clones or stays in the foreground does not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Commands that set something up, stay in the foreground or call no server: a test has a server already.
_SETS_UP = re.compile(r"\b(make|docker|git|kubectl|pip|cd|bash|python -m triton_local)\b|\.ci/run")
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block: its page, its language, its text, and the line of the page that its text begins on."""

    page: str
    language: str
    text: str
    line: int

    @property
    def calls_a_server(self) -> bool:
        """Whether the block runs unmodified against a server on the default ports."""
        return self.language == "python" or (self.language == "bash" and not _SETS_UP.search(self.text))

    def __str__(self) -> str:
        return f"{self.page}-{self.language}-line-{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return every fenced block of a page, in order."""
    text = page.read_text()
    return [
        Block(page.stem, match["language"], match["text"], text.count("\n", 0, match.start("text")) + 1)
        for match in _FENCE.finditer(text)
    ]


def table(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this heading."""
    (rows,) = re.findall(rf"^\| {heading} \|.*\n\|[-|: ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows.splitlines()]


def page_blocks() -> list[Block]:
    """Return the blocks of README.md and of the pages under docs/."""
    return [block for page in PAGES for block in blocks(page)]
