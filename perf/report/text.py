"""Numbers and tables as text: Markdown for the documents, aligned columns for a terminal.

Three significant digits: more would claim a precision that no run has.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

_NONE = "–"


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


def at(row: Any, path: str) -> Any:  # noqa: ANN401 - JSON
    """Return a row's value at a path of keys, such as limit/fraction; None where there is none."""
    for key in path.split("/"):
        row = None if row is None else row.get(key)
    return row


class Column(NamedTuple):
    """cell: the path of a row's value, or a function of the row; None where it doesn't apply. shown: a number as text.

    A column that applies to no row is left out.
    """

    title: str
    cell: str | Callable[[Any], str | float | None]
    right: bool = True
    shown: Callable[[Any], str] = figure

    def text(self, row: object) -> str | None:
        """Return a row's cell."""
        found = at(row, self.cell) if isinstance(self.cell, str) else self.cell(row)
        return found if found is None or isinstance(found, str) else self.shown(found)


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


def table(columns: Sequence[Column], rows: Sequence[object], notes: Sequence[str]) -> Table:
    """Lay out the rows in the columns that apply to any of them."""
    cells = {column: [column.text(row) for row in rows] for column in columns}
    used = {column: found for column, found in cells.items() if any(one is not None for one in found)}
    return Table(
        [column.title for column in used],
        [column.right for column in used],
        [[_NONE if cell is None else cell for cell in row] for row in zip(*used.values(), strict=True)],
        notes,
    )


def terminal(table: Table) -> str:
    """Return the table in aligned columns under wrapped titles, and its notes."""
    columns = list(zip(table.titles, *table.rows, strict=True))
    wide = [max(map(len, [*title.split(), *cells]), default=0) for title, *cells in columns]
    titles = [textwrap.wrap(title, width) for title, width in zip(table.titles, wide, strict=True)]
    lines = [*zip_longest(*titles, fillvalue=""), ["-" * width for width in wide], *table.rows]
    aligned = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, wide, table.right, strict=True)
        )
        for line in lines
    ]
    return "\n".join([*aligned, *(["", *table.notes] if table.notes else [])])
