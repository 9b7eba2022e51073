"""Places in a Markdown file that a program fills: between <!-- table: NAME --> and <!-- end: NAME -->.

Everything outside stays as it is, to the byte. Knows nothing about what is put in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MARKER = re.compile(r"^<!-- *(?P<what>table|plot|end): *(?P<name>.*?) *-->$", re.MULTILINE)


class MarkerError(ValueError):
    """A marker without its other end. The message names the document, the block and the line."""


@dataclass(frozen=True)
class Place:
    """A block of a document: its kind (table or plot), its name, and what is between its markers as [start, stop)."""

    kind: str
    name: str
    start: int
    stop: int


def places(document: str, text: str) -> list[Place]:
    """Return the blocks in order. Raises MarkerError for a block that isn't ended, or ends without a beginning."""
    return list(_places(document, text))


def filled(text: str, place: Place, content: str) -> str:
    """Return the text with this between the block's markers, and an empty line before and after it."""
    return f"{text[: place.start]}\n\n{content}\n\n{text[place.stop :]}"


def _places(document: str, text: str) -> Iterator[Place]:
    opened: re.Match[str] | None = None
    for marker in _MARKER.finditer(text):
        line = f"{document}, line {text.count(chr(10), 0, marker.start()) + 1}"
        if marker["what"] != "end":
            if opened is not None:
                raise MarkerError(f"{line}: {_named(marker)} begins before {_named(opened)} has its end")
            opened = marker
        elif opened is None:
            raise MarkerError(f"{line}: the end of {marker['name']!r} has no beginning")
        elif opened["name"] != marker["name"]:
            raise MarkerError(f"{line}: the end of {marker['name']!r} stands where {_named(opened)} should end")
        else:
            yield Place(opened["what"], opened["name"], opened.end(), marker.start())
            opened = None
    if opened is not None:
        raise MarkerError(f"{document}: {_named(opened)} has no <!-- end: {opened['name']} -->")


def _named(marker: re.Match[str]) -> str:
    return f"{marker['what']} {marker['name']!r}"
