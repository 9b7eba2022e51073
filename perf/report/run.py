"""A result's file: where its figures come from, and its measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from perf.report.fields import Fields, ResultError
from perf.report.measurement import Measurement, NotRun

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "perf" / "results"


@dataclass(frozen=True)
class Origin:
    """What must stand beside every figure: on what, when, with what and by which command it was measured.

    changed: the code wasn't the same to the end of the run.
    """

    device: str
    cores: int
    threads: int | None
    model: str
    date: str
    commit: str
    uncommitted: bool
    changed: bool
    versions: dict[str, str]
    command: str
    file: str

    @property
    def hardware(self) -> str:
        """The device in a few words."""
        return f"{self.device}, {self.cores} cores" if self.device.startswith("CPU") else self.device

    @property
    def subject(self) -> str:
        """Device and model, for a plot's title."""
        return f"{self.hardware}; {self.model}"

    def line(self) -> str:
        """Return it all as one line of Markdown."""
        threads = "" if self.threads is None else f", {self.threads} thread{'s' if self.threads > 1 else ''} a server"
        no_gpu = " (no GPU)" if self.device.startswith("CPU") else ""
        uncommitted = " with uncommitted changes" if self.uncommitted else ""
        changed = ", and changed during the run" if self.changed else ""
        commit = f"commit `{self.commit[:7]}`{uncommitted}{changed}"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.hardware}{no_gpu}{threads}; {self.model}; {self.date}; {commit}; {versions}. "
            f"`{self.command}` writes `{self.file}`."
        )


class Run:
    """The content of one result's file. Sections and measurements are looked at when they are asked for."""

    def __init__(self, content: object, file: str) -> None:
        self.fields = Fields(content, file)
        self.kind = self.fields.text("kind")
        self.settings = self.fields.part("settings")
        self.origin = self._origin(file)

    def measured(self, *prefix: str) -> list[Measurement]:
        """Return the measurements whose keys begin with these parts, in the file's order, without those not run."""
        return [
            Measurement.of(key, fields)
            for key, fields in self.fields.part("measurements").parts()
            if _below(key, prefix) and NotRun.among(fields) is None
        ]

    def not_run(self, *prefix: str) -> list[NotRun]:
        """Return what should have been measured under these keys and couldn't, each server once."""
        found = [
            NotRun.among(fields) for key, fields in self.fields.part("measurements").parts() if _below(key, prefix)
        ]
        return list(dict.fromkeys(reason for reason in found if reason is not None))

    def _origin(self, file: str) -> Origin:
        machine = self.fields.part("machine")
        versions = machine.part("versions")
        return Origin(
            device=machine.text("device"),
            cores=machine.count("cores"),
            threads=self.settings.count("threads") if "threads" in self.settings else None,
            model=self.settings.text("model"),
            date=self.fields.text("date").split("T")[0],
            commit=machine.text("commit"),
            uncommitted=machine.flag("uncommitted_changes"),
            changed="changed_during_run" in machine and machine.flag("changed_during_run"),
            versions={"Python": machine.text("python"), **{name: versions.text(name) for name in versions.names()}},
            command=(self.fields if "command" in self.fields else self.settings).text("command"),
            file=file,
        )


def read(file: Path) -> Run:
    """Read one result's file. Raises ResultError where it isn't one."""
    return Run(_content(file), _shown(file))


def read_all(folder: Path = RESULTS) -> dict[str, Run]:
    """Return the folder's results by their kinds. A file without a kind is of an older form, and not reported on.

    Raises ResultError where one can't be read or two are of one kind.
    """
    found: dict[str, Run] = {}
    for file in sorted(folder.glob("*.json")):
        content = _content(file)
        if isinstance(content, dict) and "kind" not in content:
            continue
        run = Run(content, _shown(file))
        if run.kind in found:
            raise ResultError(f"{found[run.kind].origin.file} and {run.origin.file} are both of kind {run.kind!r}")
        found[run.kind] = run
    return found


def _content(file: Path) -> object:
    try:
        content: object = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ResultError(f"{_shown(file)} is not JSON: {error}") from error
    return content


def _shown(file: Path) -> str:
    """Return the path inside the repository, or the name alone: a machine's own folders belong in no document."""
    resolved = file.resolve()
    return resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else file.name


def _below(key: str, prefix: tuple[str, ...]) -> bool:
    return tuple(key.split("/")[: len(prefix)]) == prefix
