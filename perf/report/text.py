"""Numbers and tables as text: Markdown for the documents, aligned columns for a terminal.

Three significant digits: more would claim a precision that no run has.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

WIDTH = 120
_NONE = "–"
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


def table(columns: Sequence[Column[Row]], rows: Sequence[Row], notes: Sequence[str]) -> Table:
    """Lay out the rows in the columns that apply to any of them."""
    cells = [(column, [column.cell(row) for row in rows]) for column in columns]
    used = [(column, found) for column, found in cells if any(one is not None for one in found)]
    texts = [
        [_NONE if one is None else one if isinstance(one, str) else figure(one) for one in found] for _, found in used
    ]
    return Table(
        [column.title for column, _ in used],
        [column.right for column, _ in used],
        [[column[number] for column in texts] for number in range(len(rows))],
        notes,
    )


def terminal(table: Table, width: int = WIDTH) -> str:
    """Return the table in aligned columns, and its notes.

    Titles are wrapped. Columns beyond the width follow in blocks beneath, each after the leading columns of texts.
    """
    cells = [[row[number] for row in table.rows] for number in range(len(table.titles))]
    wide = [max(map(len, [*title.split(), *rows]), default=0) for title, rows in zip(table.titles, cells, strict=True)]
    keys = list(range(next((number for number, right in enumerate(table.right) if right), len(wide))))
    blocks = [list(keys)]
    for number in range(len(keys), len(wide)):
        # At least one column beside the texts, however wide.
        if blocks[-1] != keys and sum(wide[other] + len(_GAP) for other in [*blocks[-1], number]) > width + len(_GAP):
            blocks.append(list(keys))
        blocks[-1].append(number)

    def line(block: Sequence[int], row: Sequence[str]) -> str:
        aligned = (row[one].rjust(wide[one]) if table.right[one] else row[one].ljust(wide[one]) for one in block)
        return _GAP.join(aligned).rstrip()

    titles = [textwrap.wrap(title, wide[number], break_on_hyphens=False) for number, title in enumerate(table.titles)]
    head = [*zip_longest(*titles, fillvalue=""), ["-" * column for column in wide]]
    # A block whose titles are all short has empty lines in the head.
    text = "\n\n".join("\n".join(filter(None, (line(block, row) for row in [*head, *table.rows]))) for block in blocks)
    notes = [textwrap.fill(note.replace("`", ""), width) for note in table.notes]
    return "\n".join([text, *([""] if notes else []), *notes])
