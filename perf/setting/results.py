"""A result's file: what was measured, on what, with what; written after every measurement, so that a run can go on.

    {"kind": "article", "date": …, "machine": {commit, device, cores, versions, …}, "settings": {…},
     "measurements": {key: {…}, …}, … sections of its own}

Knows the form, not what is in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from setting import machine

PERCENTILES = (50, 95, 99)


class Results:
    """One run's results in one file. What is in the file already, under the same settings, need not be measured again.

    Raises ValueError if the file to resume was measured on another commit, machine or setting.
    """

    def __init__(self, path: Path, kind: str, settings: Mapping[str, Any], resume: bool) -> None:
        self._path = path
        fresh: dict[str, Any] = {
            "kind": kind,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine.describe(),
            "settings": dict(settings),
            "measurements": {},
        }
        self._content = self._resumed(fresh) if resume and path.exists() else fresh

    def has(self, key: str) -> bool:
        """Say whether that measurement is there already."""
        return key in self._content["measurements"]

    def add(self, key: str, measurement: Mapping[str, Any]) -> None:
        """Add a measurement and write the file."""
        self._content["measurements"][key] = dict(measurement)
        self.write()

    def section(self, name: str, content: object) -> None:
        """Set a section of the run's own beside the measurements and write the file."""
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
        """Write the file, whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        building = self._path.with_suffix(".partial")
        building.write_text(json.dumps(self._content, indent=1) + "\n")
        building.rename(self._path)

    def _resumed(self, fresh: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_text())
        for name in ("kind", "settings"):
            # Through JSON, as what was read has been.
            if found[name] != json.loads(json.dumps(fresh[name])):
                raise ValueError(f"{self._path} has other {name} ({found[name]}); resume with those, or start anew")
        for name in ("commit", "device", "cores"):
            if found["machine"][name] != fresh["machine"][name]:
                raise ValueError(
                    f"{self._path} was measured on {name} {found['machine'][name]}, this is {fresh['machine'][name]}: "
                    "start anew"
                )
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
