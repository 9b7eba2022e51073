"""The points of a search by `make tune`: settings, what was measured with them, and which ones nothing beats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from perf.report.fields import Fields
from perf.report.measurement import Load
from perf.report.run import Run


@dataclass(frozen=True)
class TunePoint:
    """One point. settings: as in the config. pareto: none has as much throughput at as low a p95, and one better."""

    settings: Mapping[str, str]
    tokens_per_second: float
    p50: float
    p95: float
    pareto: bool
    recommended: bool

    def described(self, names: Collection[str]) -> str:
        """Return these of the settings in a few words."""
        return ", ".join(f"{_short(name)} {value}" for name, value in self.settings.items() if name in names)


def points(run: Run) -> list[TunePoint]:
    """Return the points that worked, by falling throughput; none if the run has no search."""
    if "points" not in run.fields:
        return []
    chosen = None
    if (recommended := run.fields.optional_part("recommended")) is not None:
        chosen = _settings(recommended.part("settings"))
    found = [_point(fields, chosen) for fields in run.fields.listed("points") if "failure" not in fields]
    return sorted(found, key=lambda point: -point.tokens_per_second)


def bound(run: Run) -> float:
    """Return the bound on p95 that was searched under, in seconds."""
    return run.fields.number("slo_p95_ms") / 1e3


def load(run: Run) -> Load:
    """Return what every point was measured under."""
    return Load.of(run.settings.part("load"))


def _point(fields: Fields, chosen: Mapping[str, str] | None) -> TunePoint:
    settings = _settings(fields.part("settings"))
    return TunePoint(
        settings=settings,
        tokens_per_second=fields.number("tokens_per_second"),
        p50=fields.number("p50_ms") / 1e3,
        p95=fields.number("p95_ms") / 1e3,
        pareto=fields.flag("pareto"),
        recommended=settings == chosen,
    )


def _settings(fields: Fields) -> dict[str, str]:
    """Return the settings that a config has as text, in the file's order; a null is one that it doesn't have."""
    return {name: _text(fields.plain(name)) for name in fields.names() if name in fields}


def _text(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _short(name: str) -> str:
    return {
        "max_queue_delay_microseconds": "delay µs",
        "preferred_batch_size": "preferred",
        "prefill_tokens": "prefill",
    }.get(name, name)
