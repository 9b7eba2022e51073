"""Numbers and tables as text: Markdown for the documents, aligned columns for a terminal.

Three significant digits: more would claim a precision that no run has.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

NONE = "–"
WIDTH = 120
_GAP = "  "

Row = TypeVar("Row")


def figure(value: float) -> str:
    """Return at least three significant digits without an exponent: 0.0123, 1.23, 12.3, 123, 1,235."""
    if value == 0:
        return "0"
    for digits in range(8):
        if abs(value) >= 10.0 ** (2 - digits):
            return f"{value:,.{digits}f}"
    return f"{value:.2e}"


def percent(share: float) -> str:
    """Return a share of 1 in percent, with more digits close to 0 and 1; only exactly 1 becomes 100 %."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    for digits in range(0 if 0.0995 <= share < 0.9 else 1, 4):
        if (text := f"{100 * share:.{digits}f}") != f"{100:.{digits}f}":
            return f"{text} %"
    return f"{100 * share:.5f} %"


def several(*values: float) -> str:
    """Return percentiles in one cell: 1.23 / 4.56."""
    return " / ".join(map(figure, values))


@dataclass(frozen=True)
class Column(Generic[Row]):
    """cell: a row's text or figure; None where it doesn't apply. A column that applies to no row is left out."""

    title: str
    cell: Callable[[Row], str | float | None]
    right: bool = True

    def text(self, row: Row) -> str | None:
        """Return the row's cell as text."""
        found = self.cell(row)
        return found if found is None or isinstance(found, str) else figure(found)


@dataclass(frozen=True)
class Table:
    """right: which columns are aligned to the right. notes: Markdown paragraphs beneath the table."""

    titles: Sequence[str]
    right: Sequence[bool]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table and its notes, without a final newline."""
        lines = [self.titles, ["---:" if right else "---" for right in self.right], *self.rows]
        text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n\n".join([text, *self.notes])

    def columns(self, numbers: Sequence[int]) -> Table:
        """Return the table with only these columns, without notes."""
        return Table(
            [self.titles[number] for number in numbers],
            [self.right[number] for number in numbers],
            [[row[number] for number in numbers] for row in self.rows],
        )


def table(columns: Sequence[Column[Row]], rows: Sequence[Row], notes: Sequence[str]) -> Table:
    """Lay out the rows in the columns that apply to any of them."""
    cells = [(column, [column.text(row) for row in rows]) for column in columns]
    used = [(column, texts) for column, texts in cells if any(text is not None for text in texts)]
    return Table(
        titles=[column.title for column, _ in used],
        right=[column.right for column, _ in used],
        rows=[
            [NONE if texts[number] is None else str(texts[number]) for _, texts in used] for number in range(len(rows))
        ],
        notes=notes,
    )


def terminal(table: Table, width: int = WIDTH) -> str:
    """Return the table in aligned columns, columns beyond the width in further blocks beneath, then the notes."""
    blocks = "\n\n".join("\n".join(_lines(block, width)) for block in _blocks(table, width))
    notes = [textwrap.fill(note.replace("`", ""), width) for note in table.notes]
    return "\n".join([blocks, *([""] if notes else []), *notes])


def _blocks(table: Table, width: int) -> list[Table]:
    """Split a table that is too wide; each block repeats the leading columns of texts."""
    wide, least = _widths(table)
    if _total(least) <= width:
        return [table]
    keys = list(range(next((number for number, right in enumerate(table.right) if right), len(wide))))
    blocks = [list(keys)]
    for number in range(len(keys), len(wide)):
        # At least one column beside the texts, however wide.
        if len(blocks[-1]) > len(keys) and _total([wide[other] for other in [*blocks[-1], number]]) > width:
            blocks.append(list(keys))
        blocks[-1].append(number)
    return [table.columns(block) for block in blocks]


def _lines(table: Table, width: int) -> list[str]:
    widths, least = _widths(table)
    # Narrow the widest column of texts down to its longest word; figures are never wrapped.
    while _total(widths) > width and any(wide > narrow for wide, narrow in zip(widths, least, strict=True)):
        can = [number for number in range(len(widths)) if widths[number] > least[number]]
        widths[max(can, key=lambda number: widths[number])] -= 1
    head = [*_wrapped(table.titles, widths, table.right), _GAP.join("-" * column for column in widths)]
    return head + [line for row in table.rows for line in _wrapped(row, widths, table.right)]


def _widths(table: Table) -> tuple[list[int], list[int]]:
    """Return each column's width with every cell on one line, and its least width; titles may wrap in both."""
    wide, least = [], []
    for number, (title, right) in enumerate(zip(table.titles, table.right, strict=True)):
        cells = [row[number] for row in table.rows]
        words = [word for text in [title, *([] if right else cells)] for word in text.split()]
        wide.append(max(map(len, [*title.split(), *cells]), default=0))
        least.append(wide[-1] if right else max(map(len, words), default=0))
    return wide, least


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


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
