"""A result's file: what was measured, on what, with what.

    {"kind": "article", "date": …, "machine": {commit, device, cores, versions, …}, "settings": {…},
     "measurements": {key: {…}, …}, … sections of its own}

It is written after every measurement, so that a run can be resumed, but to a partial file elsewhere: the last complete
result stays until there is another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perf import environment

PARTIAL = environment.ROOT / ".work" / "results"
"""Unfinished runs write here, not beside the results, which are reported on and committed."""


class Results:
    """One run's results. Everything added is written to `partial`, and `finish` makes that the result's file.

    resume: continue the partial file if there is one, else the result's. Raises ValueError if that was measured on
    another commit, machine or setting, or is not a result's file.
    """

    def __init__(
        self, path: Path, kind: str, settings: Mapping[str, Any], resume: bool, folder: Path = PARTIAL
    ) -> None:
        self._path = path
        # Results in two folders may have the same file name.
        place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
        self.partial = folder / f"{path.stem}-{place}.json"
        fresh: dict[str, Any] = {
            "kind": kind,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": environment.describe(),
            "settings": dict(settings),
            "measurements": {},
        }
        before = next((file for file in (self.partial, path) if file.exists()), None)
        self._content = _resumed(before, fresh) if resume and before is not None else fresh

    def add(self, key: str, measurement: Mapping[str, Any]) -> None:
        """Add a measurement and write the partial file."""
        self._content["measurements"][key] = dict(measurement)
        self._write(self.partial)

    def forget(self, key: str) -> None:
        """Remove a measurement, if it exists."""
        self._content["measurements"].pop(key, None)

    def section(self, name: str, content: object) -> None:
        """Set a further section beside the measurements and write the partial file."""
        self._content[name] = content
        self._write(self.partial)

    @property
    def device(self) -> str:
        """The device of the run."""
        return str(self._content["machine"]["device"])

    def get(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """Return a section, or None."""
        return self._content.get(name)

    @property
    def measurements(self) -> Mapping[str, Mapping[str, Any]]:
        """The measurements by their keys."""
        measured: Mapping[str, Mapping[str, Any]] = self._content["measurements"]
        return measured

    def finish(self) -> None:
        """End the run: write the result's file, atomically, and delete the partial one.

        If the code has changed since the run began, `machine` has "changed_during_run": true.
        """
        if not environment.sources().items() <= self._content["machine"].items():
            self._content["machine"]["changed_during_run"] = True
        self._write(self._path)
        self.partial.unlink(missing_ok=True)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_suffix(".partial")
        building.write_text(json.dumps(self._content, indent=1) + "\n")
        building.rename(path)


def _resumed(file: Path, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file to resume. Raises ValueError for one that does not belong to this run."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        # Through JSON, as the file's content has been.
        for name in ("kind", "settings"):
            if found[name] != json.loads(json.dumps(fresh[name])):
                raise ValueError(f"{file} has other {name} ({found[name]}); resume with those, or start anew")
        before, now = found["machine"], fresh["machine"]
        for name in ("commit", "device", "cores"):
            if before[name] != now[name]:
                raise ValueError(f"{file} was measured on {name} {before[name]}, this is {now[name]}: start anew")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} can't be resumed, it isn't a result's file: {error!r}; start anew") from error
    return found
