"""A table of results, its columns and figures, and the notes beneath it.

Figures have three significant digits: more would claim a precision that no run has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from perf.results_file import Result, Row, at


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


MODEL_COLUMN = Column("model", "model", lambda model: str(model).split(" parameters")[0].removeprefix("Llama of "))


def beside(names: Mapping[str, str], *columns: Column) -> list[Column]:
    """Return each column once for each name, with the values under the name's key in a row of `pivot`."""
    return [
        Column(f"{title}: {name}", f"{key}/{path}", shown)
        for title, path, shown in columns
        for key, name in names.items()
    ]


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


def markdown(result: Result, make: Callable[[Sequence[Row]], Sequence[Table]], notes: bool = True) -> str:
    """Return tables and the notes beneath them, without a final newline; "" if nothing was measured."""
    if not result.measured():
        return ""
    parts, loads = [], list[str]()
    for columns, rows, note in make(result.measured()):
        used = [column for column in columns if any(column.cell(row) is not None for row in rows)]
        lines = [
            [column.title for column in used],
            ["---" if column.shown is str else "---:" for column in used],
            *([column.cell(row) or "–" for column in used] for row in rows),
        ]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        loads += filter(None, [note])
    if notes:
        parts.append("\n".join(f"- {note}" for note in [*loads, *conditions(result)]))
    return "\n\n".join(parts)


def conditions(result: Result) -> list[str]:
    """Return the notes beneath a table: steps, errors, what did not run, steal time, machine and command."""
    rows, settings = result.measured(), result.content["settings"]
    steps = [(row["title"], at(row, "settings/decode_steps")) for row in rows if row["weights"] == "INT8"]
    missing = [row for row in result.content["measurements"].values() if "not_run" in row]
    notes = [
        _by_server("Decode steps", steps),
        _by_server("Failed requests", [(row["title"], row.get("errors") or None) for row in rows]),
        _by_server("Not run", [(row["title"], row["not_run"]) for row in missing]),
    ]
    steal, title = max((row.get("stolen_share", 0.0), row["title"]) for row in rows)
    if steal >= 0.005:  # less is noise
        notes.append(f"Steal time: at most {percent(steal)} of the processors' time, with {title}.")
    if "text" in settings:
        notes.append(
            f"On {settings['text']}: {settings['tokens']:,} predicted tokens in texts of at most "
            f"{settings['context']}; ± is one standard error."
        )
    machine = result.content["machine"]
    cores = f", {machine['cores']} cores (no GPU)" if machine["device"].startswith("CPU") else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    notes.append(
        f"{machine['device']}{cores}; {settings['model']}; Python {machine['python']}, {versions}; "
        f"{_version(result.content)} writes `{result.file}`."
    )
    earlier = [(_version(result.content["runs"][row["run"]]), row["title"]) for row in rows if "run" in row]
    for run in dict.fromkeys(run for run, _ in earlier):
        titles = dict.fromkeys(title for other, title in earlier if other == run)
        notes.append(f"Of another run, {', '.join(titles)}: {run}.")
    return [*filter(None, notes)]


def _version(run: Row) -> str:
    """Return a run's date, commit and command."""
    machine = run["machine"]
    uncommitted = " with uncommitted changes" if machine["uncommitted_changes"] else ""
    return f"{run['date'].split('T')[0]}; commit `{machine['commit'][:7]}`{uncommitted}; `{run['command']}`"


def _by_server(name: str, values: Sequence[tuple[str, object]]) -> str:
    """Return the values as a note, each server's once; "" if all are None."""
    texts = dict.fromkeys(f"{title}: {value}" for title, value in values if value is not None)
    return f"{name}, {'; '.join(texts)}." if texts else ""
