"""Result files (perf/results/*.json): their head, and their measurements as JSON has them, by key.

    {"kind", "date", "command", "machine": {…}, "settings": {…}, "measurements": {"article/equal/naive_fp32": {…}, …}}

A measurement that could not be made has "not_run" with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "perf" / "results"

Row = Mapping[str, Any]
"""A measurement, or a section of a result."""


class ResultError(ValueError):
    """A result file that can't be read. The message names the file and what is missing."""


class NotMeasuredError(Exception):
    """A result has nothing for a table or a plot."""


class Result(NamedTuple):
    """A result file. file: its path inside the repository."""

    file: str
    content: Row

    def measured(self, *prefixes: str) -> list[Row]:
        """Return the measurements whose keys begin with one of these. Raises NotMeasuredError if there is none."""
        found = [entry for _, entry in self._entries(prefixes) if _reason(entry) is None]
        if not found:
            raise NotMeasuredError(f"{self.file} has no measurement of {', '.join(prefixes)}")
        return found

    def missing(self, *prefixes: str) -> list[str]:
        """Return a note of what could not be measured under these keys, by its title or else its key, and why."""
        reasons = [(key, entry, _reason(entry)) for key, entry in self._entries(prefixes)]
        each = dict.fromkeys(f"{entry.get('title') or key} ({why})" for key, entry, why in reasons if why is not None)
        return [f"Not run: {'; '.join(each)}."] if each else []

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
        changed = ", and changed during the run" if machine.get("changed_during_run") else ""
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        return (
            f"{self._hardware()}{no_gpu}{threads}; {settings['model']}; {self.content['date'].split('T')[0]}; "
            f"commit `{machine['commit'][:7]}`{uncommitted}{changed}; "
            f"Python {machine['python']}, {versions}. `{self.content['command']}` writes `{self.file}`."
        )

    def _hardware(self) -> str:
        device: str = self.content["machine"]["device"]
        return f"{device}, {self.content['machine']['cores']} cores" if device.startswith("CPU") else device

    def _entries(self, prefixes: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
        entries: Mapping[str, Row] = self.content["measurements"]
        return ((key, entry) for start in prefixes for key, entry in entries.items() if key.startswith(start))


def _reason(entry: Row) -> str | None:
    """Return why there is no measurement here; None if there is one."""
    # A load without a single answer has no latencies.
    if entry.get("errors") and "load" in entry and "latency_ms" not in entry:
        return f"all {entry['errors']} requests failed"
    return entry.get("not_run")


def read(file: Path) -> Result:
    """Read one result file. Raises ResultError."""
    return parse(_content(file), _shown(file))


def read_all(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the folder's results by name, without .json; files without a kind predate this form and are skipped.

    Raises ResultError for a file that can't be read.
    """
    contents = {file: _content(file) for file in sorted(folder.glob("*.json"))}
    return {
        file.stem: parse(content, _shown(file))
        for file, content in contents.items()
        if not (isinstance(content, dict) and "kind" not in content)
    }


def parse(content: Any, file: str) -> Result:  # noqa: ANN401 - JSON
    """Return a result whose head is complete. file: its name for messages. Raises ResultError."""
    result = Result(file, content)
    try:
        result.origin()
        result.missing()
    except (KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{file} has no head of a result: {error!r}") from error
    return result


def _content(file: Path) -> object:
    try:
        content: object = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ResultError(f"{_shown(file)} is not JSON: {error}") from error
    return content


def _shown(file: Path) -> str:
    """Return the path inside the repository, or the name alone: documents contain no folders of a machine."""
    resolved = file.resolve()
    return resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else file.name
