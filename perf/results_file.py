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
from typing import Any

from perf import environment

RESULTS = environment.ROOT / "perf" / "results"


class Results:
    """One run's results, written to FILE.partial after every measurement; `finish` makes that the file.

    The last complete result stays until there is another one.
    """

    def __init__(self, path: Path, kind: str, settings: Mapping[str, Any], command: str) -> None:
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
