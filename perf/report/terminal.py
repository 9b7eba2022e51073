"""The same tables for a terminal: aligned columns, nothing wider than 120 characters."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from report.run import Run
from report.table import Table
from report.tables import article, peers

WIDTH = 120
_GAP = "  "


def text(table: Table, width: int = WIDTH) -> str:
    """Return the table in columns as wide as they must be, and its notes beneath."""
    widths = _widths(table, width)
    lines = _wrapped(table.titles, widths, table.right)
    lines.append(_GAP.join("-" * column for column in widths))
    for row in table.rows:
        lines += _wrapped(row, widths, table.right)
    notes = [textwrap.fill(note.replace("`", ""), width) for note in table.notes]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def summary(run: Run) -> str:
    """Return what a run of `make bench` ends with: the article's tables and, where they were measured, the peers'."""
    titles = {
        "The article's setting": article.article(run),
        "The same at mixed lengths": article.mixed(run),
        "Peers, closed loop": peers.closed(run),
        "Peers, Poisson arrivals": peers.poisson(run),
    }
    return "\n\n".join(f"{title}\n\n{text(table)}" for title, table in titles.items() if table is not None)


def _widths(table: Table, width: int) -> list[int]:
    """Return the columns' widths: what the cells need, and the titles' longest words, since titles may be wrapped.

    If that is too wide, the widest column of texts is narrowed, down to its longest word; figures are never wrapped.
    """
    columns = [[row[index] for row in table.rows] for index in range(len(table.titles))]
    words = [_longest(title.split()) for title in table.titles]
    widths = [max(word, _longest(cells)) for word, cells in zip(words, columns, strict=True)]
    least = [
        wide if right else max(word, *(_longest(cell.split()) for cell in cells))
        for wide, word, cells, right in zip(widths, words, columns, table.right, strict=True)
    ]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        can = [index for index in range(len(widths)) if widths[index] > least[index]]
        if not can:
            # Only figures and words are left, and to cut those would hide more than a long line does.
            break
        widths[max(can, key=lambda index: widths[index])] -= 1
    return widths


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _wrapped(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """Return the lines of one row."""
    columns = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(cells, widths, strict=True)]
    return [
        _GAP.join(
            part.rjust(width) if to_right else part.ljust(width)
            for part, width, to_right in zip(parts, widths, right, strict=True)
        ).rstrip()
        for parts in zip_longest(*columns, fillvalue="")
    ]
