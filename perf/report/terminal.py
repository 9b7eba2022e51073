"""The same tables for a terminal: aligned columns, nothing wider than 120 characters, the columns beyond beneath."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from perf.report.run import Run
from perf.report.table import Table
from perf.report.tables import article, peers

WIDTH = 120
_GAP = "  "


def text(table: Table, width: int = WIDTH) -> str:
    """Return the table in columns as wide as they must be, and its notes beneath."""
    blocks = "\n\n".join("\n".join(_lines(block, width)) for block in _blocks(table, width))
    notes = [textwrap.fill(note.replace("`", ""), width) for note in table.notes]
    return "\n".join([blocks, *([""] if notes else []), *notes])


def summary(run: Run) -> str:
    """Return what a run of `make bench` ends with: the article's tables and, where they were measured, the peers'."""
    titles = {
        "The article's setting": article.article(run),
        "The same at mixed lengths": article.mixed(run),
        "Peers, closed loop": peers.closed(run),
        "Peers, Poisson arrivals": peers.poisson(run),
    }
    return "\n\n".join(f"{title}\n\n{text(table)}" for title, table in titles.items() if table is not None)


def _blocks(table: Table, width: int) -> list[Table]:
    """Return the table, or as many as its columns need that don't fit; each begins with the first columns of texts."""
    if _taken(_least(table)) <= width:
        return [table]
    keys = next((index for index, right in enumerate(table.right) if right), len(table.right))
    wide = _needed(table)
    blocks = [list(range(keys))]
    for index in range(keys, len(wide)):
        last = blocks[-1]
        # One column at least beside the texts, however wide.
        if len(last) > keys and _taken([wide[other] for other in [*last, index]]) > width:
            blocks.append(last := list(range(keys)))
        last.append(index)
    return [_only(table, columns) for columns in blocks]


def _only(table: Table, columns: Sequence[int]) -> Table:
    return Table(
        titles=[table.titles[index] for index in columns],
        right=[table.right[index] for index in columns],
        rows=[[row[index] for index in columns] for row in table.rows],
    )


def _lines(table: Table, width: int) -> list[str]:
    widths = _widths(table, width)
    lines = _wrapped(table.titles, widths, table.right)
    lines.append(_GAP.join("-" * column for column in widths))
    for row in table.rows:
        lines += _wrapped(row, widths, table.right)
    return lines


def _widths(table: Table, width: int) -> list[int]:
    """Return the columns' widths: what the cells need, and the titles' longest words, since titles may be wrapped.

    If that is too wide, the widest column of texts is narrowed, down to its longest word; figures are never wrapped.
    """
    widths, least = _needed(table), _least(table)
    while _taken(widths) > width:
        can = [index for index in range(len(widths)) if widths[index] > least[index]]
        if not can:
            # Only figures and words are left, and to cut those would hide more than a long line does.
            break
        widths[max(can, key=lambda index: widths[index])] -= 1
    return widths


def _needed(table: Table) -> list[int]:
    """Return the columns' widths with every cell in one line."""
    return [
        max(_longest(title.split()), _longest([row[index] for row in table.rows]))
        for index, title in enumerate(table.titles)
    ]


def _least(table: Table) -> list[int]:
    """Return the columns' widths with texts in as many lines as they have words."""
    return [
        wide if right else max(_longest(title.split()), *(_longest(row[index].split()) for row in table.rows))
        for index, (wide, title, right) in enumerate(zip(_needed(table), table.titles, table.right, strict=True))
    ]


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


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
