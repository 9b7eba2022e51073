"""A result's file: what was measured, on what, with what; a line for each section, earlier run and measurement.

{"kind": "bench", "date": …, "command": …, "machine": {commit, device, cores, versions, …}, "settings": {…},
 "runs": {date: {command, machine, …}, …}, "measurements": {key: {…}, …}, … sections of its own}

A measurement of an earlier run has its date as `run`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from perf import environment

RESULTS = environment.ROOT / "perf" / "results"


class Results:
    """One run's results, written to FILE.partial after every measurement; `finish` makes that the file.

    The last complete result stays until there is another one. merge: its measurements stay too, where this run makes no
    other of the same key, if settings and device are the same.
    """

    def __init__(self, path: Path, kind: str, settings: Mapping[str, Any], command: str, merge: bool = False) -> None:
        self._path = path
        self._partial = path.with_suffix(".partial")
        self.measurements: dict[str, Mapping[str, Any]] = {}
        """Those so far, by key."""
        self._content: dict[str, Any] = {
            "kind": kind,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "machine": environment.describe(),
            "settings": dict(settings),
            "runs": {},
            "measurements": self.measurements,
        }
        if merge and path.exists():
            last = json.loads(path.read_text())
            if last["settings"] == dict(settings) and last["machine"]["device"] == environment.device():
                run = {name: last[name] for name in ("date", "command", "machine")}
                self._content["runs"] = {**last["runs"], run["date"]: run}
                for key, measurement in last["measurements"].items():
                    self.measurements[key] = {"run": run["date"], **measurement}

    def add(self, key: str, measurement: Mapping[str, Any]) -> None:
        """Add a measurement and write the partial file."""
        self.measurements[key] = measurement
        self._write()

    def section(self, name: str, content: object) -> None:
        """Set a further section beside the measurements and write the partial file."""
        self._content[name] = content
        self._write()

    def finish(self) -> None:
        """End the run: the partial file replaces the result's, atomically."""
        self._write()
        self._partial.rename(self._path)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        named = {each.get("run") for each in self.measurements.values()}
        runs = {date: run for date, run in self._content["runs"].items() if date in named}
        text = _lines({**self._content, "runs": runs}, "runs", "measurements")
        self._partial.write_text(f"{text}\n")


def _lines(values: Mapping[str, Any], *opened: str) -> str:
    """Return a JSON object with a line for each value; a value of the names `opened` has such lines of its own."""
    texts = {name: _lines(value) if name in opened else json.dumps(value) for name, value in values.items()}
    return "{" + ",".join(f"\n{json.dumps(name)}: {text}" for name, text in texts.items()) + "\n}"


Row = Mapping[str, Any]
"""A measurement, or several in a line of a table."""


class Result(NamedTuple):
    """A result that is read. file: its path inside the repository, or its name alone."""

    file: str
    content: Row

    def measured(self) -> list[Row]:
        """Return the measurements that were made."""
        return [row for row in self.content["measurements"].values() if "not_run" not in row]


def read(file: Path) -> Result:
    """Read a result file. Raises OSError or ValueError."""
    path = file.resolve()
    root = environment.ROOT
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return Result(name, json.loads(path.read_text()))


def at(row: Any, path: str) -> Any:  # noqa: ANN401 - JSON
    """Return a row's value at a path of keys, such as limit/fraction; None where there is none."""
    for key in path.split("/"):
        row = None if row is None else row.get(key)
    return row
