"""A result's file: what was measured, on what, with what.

    {"kind": "article", "date": …, "machine": {commit, device, cores, versions, …}, "settings": {…},
     "measurements": {key: {…}, …}, … sections of its own}

It is written after every measurement, so that a run can go on, but to a partial file elsewhere: the last whole result
stays until there is another one. Knows the form, not what is in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perf.setting import machine

PERCENTILES = (50, 95, 99)
PARTIAL = machine.ROOT / ".work" / "results"
"""Where runs that aren't finished have their files. Not beside the results: those are reported on, and committed."""

_SOURCES = ("commit", "uncommitted_changes", "changes_sha256")


class Results:
    """One run's results. Everything added is written to `partial`, and `finish` makes that the result's file.

    resume: go on with the partial file if there is one, else with the result's: what is in there need not be measured
    again. Raises ValueError if it was measured on another commit, machine or setting, or isn't a result's file.
    """

    def __init__(
        self, path: Path, kind: str, settings: Mapping[str, Any], resume: bool, folder: Path = PARTIAL
    ) -> None:
        self._path = path
        # Two files may have one name, in two folders.
        place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
        self.partial = folder / f"{path.stem}-{place}.json"
        fresh: dict[str, Any] = {
            "kind": kind,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine.describe(),
            "settings": dict(settings),
            "measurements": {},
        }
        before = next((file for file in (self.partial, path) if file.exists()), None)
        self._content = _resumed(before, fresh) if resume and before is not None else fresh

    def has(self, key: str) -> bool:
        """Say whether that measurement is there already."""
        return key in self._content["measurements"]

    def add(self, key: str, measurement: Mapping[str, Any]) -> None:
        """Add a measurement and write the partial file."""
        self._content["measurements"][key] = dict(measurement)
        self.write()

    def forget(self, key: str) -> None:
        """Take a measurement out, if it is there."""
        self._content["measurements"].pop(key, None)

    def section(self, name: str, content: object) -> None:
        """Set a section of the run's own beside the measurements and write the partial file."""
        self._content[name] = content
        self.write()

    @property
    def device(self) -> str:
        """What the run computes on."""
        found: str = self._content["machine"]["device"]
        return found

    def get(self, name: str) -> object:
        """Return a section, or None."""
        found: object = self._content.get(name)
        return found

    @property
    def measurements(self) -> Mapping[str, Mapping[str, Any]]:
        """The measurements by their keys."""
        measured: Mapping[str, Mapping[str, Any]] = self._content["measurements"]
        return measured

    def write(self) -> None:
        """Write the partial file, whole or not at all."""
        self._write(self.partial)

    def finish(self) -> None:
        """End the run: what it measured becomes the result's file, whole or not at all, and the partial one goes.

        If the code is no longer what it was when the run began, its `machine` says so: "changed_during_run": true.
        """
        measured_on = self._content["machine"]
        now = machine.sources()
        if any(measured_on[name] != now[name] for name in _SOURCES):
            measured_on["changed_during_run"] = True
        self._write(self._path)
        self.partial.unlink(missing_ok=True)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_suffix(".partial")
        building.write_text(json.dumps(self._content, indent=1) + "\n")
        building.rename(path)


def _resumed(file: Path, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file to go on with. Raises ValueError for one that doesn't belong to this run."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        # Through JSON, as what was read has been.
        for name in ("kind", "settings"):
            if found[name] != json.loads(json.dumps(fresh[name])):
                raise ValueError(f"{file} has other {name} ({found[name]}); resume with those, or start anew")
        before, now = found["machine"], fresh["machine"]
        for name in ("commit", "device", "cores"):
            if before[name] != now[name]:
                raise ValueError(f"{file} was measured on {name} {before[name]}, this is {now[name]}: start anew")
        absent = [name for name in _SOURCES if name not in before]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} can't be resumed, it isn't a result's file: {error!r}; start anew") from error
    if absent or "measurements" not in found:
        raise ValueError(f"{file} is of an older form, without {absent or 'measurements'}: start anew")
    return found


def load(path: Path) -> dict[str, Any]:
    """Return the content of a result's file."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, p95, p99 and max of these times, in milliseconds; by nearest rank, so each was really seen."""
    ordered = sorted(seconds)
    found = {f"p{share}": ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] for share in PERCENTILES}
    return {
        name: round(1e3 * value, 3)
        for name, value in {"mean": sum(ordered) / len(ordered), **found, "max": ordered[-1]}.items()
    }
