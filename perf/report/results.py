"""Result files (perf/results/*.json): their head, and their measurements as JSON has them, by key.

    {"kind", "date", "command", "machine": {…}, "settings": {…}, "measurements": {"article/equal/naive_fp32": {…}, …}}

A measurement that could not be made has "not_run" with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from perf.environment import ROOT

RESULTS = ROOT / "perf" / "results"

Row = Mapping[str, Any]
"""A measurement, or a section of a result."""


class NotMeasuredError(Exception):
    """A result has nothing for a table or a plot."""


class Result(NamedTuple):
    """A result file. file: its path inside the repository, or its name alone."""

    file: str
    content: Row

    def measured(self, *prefixes: str) -> list[Row]:
        """Return the measurements whose keys begin with one of these. Raises NotMeasuredError if there is none."""
        rows = [entry for entry in self._entries(prefixes).values() if _reason(entry) is None]
        if not rows:
            raise NotMeasuredError(f"{self.file} has no measurement of {', '.join(prefixes)}")
        return rows

    def missing(self, *prefixes: str) -> list[str]:
        """Return a note of what could not be measured under these keys, and why."""
        entries = self._entries(prefixes).values()
        reasons = dict.fromkeys(f"{entry['title']} ({why})" for entry in entries if (why := _reason(entry)) is not None)
        return [f"Not run: {'; '.join(reasons)}."] if reasons else []

    def subject(self) -> str:
        """Return device and model, for a plot's subtitle."""
        return f"{self._hardware()}; {self.content['settings']['model']}"

    def origin(self) -> str:
        """Return environment, time and command behind the figures; one line of Markdown, beneath every table."""
        machine, settings = self.content["machine"], self.content["settings"]
        no_gpu = " (no GPU)" if machine["device"].startswith("CPU") else ""
        count = settings.get("threads")
        threads = "" if count is None else f", {count} thread{'s' if count > 1 else ''} per server"
        uncommitted = " with uncommitted changes" if machine["uncommitted_changes"] else ""
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        return (
            f"{self._hardware()}{no_gpu}{threads}; {settings['model']}; {self.content['date'].split('T')[0]}; "
            f"commit `{machine['commit'][:7]}`{uncommitted}; "
            f"Python {machine['python']}, {versions}. `{self.content['command']}` writes `{self.file}`."
        )

    def _hardware(self) -> str:
        device: str = self.content["machine"]["device"]
        return f"{device}, {self.content['machine']['cores']} cores" if device.startswith("CPU") else device

    def _entries(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        entries: Mapping[str, Row] = self.content["measurements"]
        return {key: entry for start in prefixes for key, entry in entries.items() if key.startswith(start)}


def _reason(entry: Row) -> str | None:
    """Return why there is no measurement here; None if there is one."""
    # A load without a single answer has no latencies.
    if entry.get("errors") and "latency_ms" not in entry:
        return f"all {entry['errors']} requests failed"
    return entry.get("not_run")


def read(file: Path) -> Result:
    """Read a result file. Raises NotMeasuredError if there is none, OSError or ValueError."""
    path = file.resolve()
    # Pages contain no folders of a machine.
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    if not path.exists():
        raise NotMeasuredError(f"{path.stem} is not measured yet")
    return Result(name, json.loads(path.read_text()))
