"""A table of texts with the lines that belong beneath it, and its Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from perf.report.cells import NONE

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """cell: what stands in a row, None if it doesn't apply there. A column that applies nowhere is left out."""

    title: str
    cell: Callable[[Row], str | None]
    right: bool = True


@dataclass(frozen=True)
class Table:
    """right: which columns are aligned to the right. notes: Markdown, one paragraph each, beneath the table."""

    titles: Sequence[str]
    right: Sequence[bool]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the table and its notes, without a newline at the end."""
        lines = [self.titles, ["---:" if right else "---" for right in self.right], *self.rows]
        text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n\n".join([text, *self.notes])


def table(columns: Sequence[Column[Row]], rows: Sequence[Row], notes: Sequence[str]) -> Table:
    """Lay these rows out in the columns that apply to any of them."""
    cells = [[column.cell(row) for row in rows] for column in columns]
    used = [index for index, column in enumerate(cells) if any(cell is not None for cell in column)]
    return Table(
        titles=[columns[index].title for index in used],
        right=[columns[index].right for index in used],
        rows=[[_shown(cells[index][number]) for index in used] for number in range(len(rows))],
        notes=notes,
    )


def _shown(cell: str | None) -> str:
    return NONE if cell is None else cell
