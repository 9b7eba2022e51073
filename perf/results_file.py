"""A result's file: what was measured, on what, with what.

{"kind": "bench", "date": …, "command": …, "machine": {commit, device, cores, versions, …}, "settings": {…},
 "measurements": {key: {…}, …}, … sections of its own}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from perf import environment

RESULTS = environment.ROOT / "perf" / "results"


class Results:
    """One run's results, written to FILE.partial after every measurement; `finish` makes that the file.

    The last complete result stays until there is another one. merge: its measurements stay too, where this run makes no
    other of the same key, if settings and device are the same; each then has the run it was made by.
    """

    def __init__(self, path: Path, kind: str, settings: Mapping[str, Any], command: str, merge: bool = False) -> None:
        self._path = path
        self._partial = path.with_suffix(".partial")
        self._content: dict[str, Any] = {
            "kind": kind,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "machine": environment.describe(),
            "settings": dict(settings),
            "measurements": {},
        }
        if merge and path.exists():
            last = json.loads(path.read_text())
            run = {name: last[name] for name in ("date", "command", "machine")}
            same = last["settings"] == dict(settings) and last["machine"]["device"] == environment.device()
            for key, measurement in last["measurements"].items() if same else ():
                self._content["measurements"][key] = {"run": run, **measurement}

    @property
    def measurements(self) -> Mapping[str, Mapping[str, Any]]:
        """The measurements so far, by key."""
        return MappingProxyType(self._content["measurements"])

    def add(self, key: str, measurement: Mapping[str, Any]) -> None:
        """Add a measurement and write the partial file."""
        self._content["measurements"][key] = dict(measurement)
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
        self._partial.write_text(json.dumps(self._content, indent=1) + "\n")


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
