"""A table of results, its columns and its figures.

Figures have three significant digits: more would claim a precision that no run has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from perf.results_file import Row, at


def figure(value: float) -> str:
    """Return at least three significant digits without an exponent: 0.0123, 1.23, 12.3, 123, 1,235."""
    if value == 0:
        return "0"
    for digits in range(8):
        if abs(value) >= 10.0 ** (2 - digits):
            return f"{value:,.{digits}f}"
    return f"{value:.2e}"


def percent(share: float) -> str:
    """Return a share of 1 in percent, with a digit more below 10 % and from 90 %."""
    return f"{100 * share:.{0 if 0.0995 <= share < 0.9 else 1}f} %"


def several(*values: float) -> str:
    """Return percentiles in one cell: 1.23 / 4.56."""
    return " / ".join(map(figure, values))


class Column(NamedTuple):
    """path: of a row's value. shown: the value as text. A column without a value in any row is left out."""

    title: str
    path: str
    shown: Callable[[Any], str] = figure

    def cell(self, row: Row) -> str | None:
        """Return the value's text; None where there is no value."""
        value = at(row, self.path)
        return None if value is None else self.shown(value)


class Table(NamedTuple):
    """note: of the load, beneath it, before the conditions; "" for none."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""


def pivot(rows: Sequence[Row], line: Sequence[str], column: str) -> list[dict[str, Any]]:
    """Join the rows with the same values at the paths `line`.

    A line has the fields of its first row, and every whole row by its value at the path `column`.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        values = tuple(at(row, path) for path in line)
        lines.setdefault(values, {**row})[str(at(row, column))] = row
    return [*lines.values()]
