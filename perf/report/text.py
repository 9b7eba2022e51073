"""Numbers and tables as Markdown.

Three significant digits: more would claim a precision that no run has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


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
        value = at(row, self.cell) if isinstance(self.cell, str) else self.cell(row)
        return value if value is None or isinstance(value, str) else self.shown(value)


def table(columns: Sequence[Column], rows: Sequence[object], notes: Sequence[str] = ()) -> str:
    """Return a table in Markdown and the notes beneath it, without a final newline."""
    cells = [(column, [column.text(row) for row in rows]) for column in columns]
    used = [(column, texts) for column, texts in cells if any(text is not None for text in texts)]
    lines: list[Sequence[str | None]] = [
        [column.title for column, _ in used],
        ["---:" if column.right else "---" for column, _ in used],
        *zip(*(texts for _, texts in used), strict=True),
    ]
    text = "\n".join("| " + " | ".join("–" if cell is None else cell for cell in line) + " |" for line in lines)
    return "\n\n".join(filter(None, [text, "\n".join(f"- {note}" for note in notes)]))
