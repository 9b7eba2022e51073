"""The verdict of a soak: each condition with its figure, its bound, and whether it held.

Memory, descriptors and threads must not grow over the second half of the time, in two respects: the trend's confidence
interval must end below a bound per hour, so that noisy figures don't pass; and the level at the end must not exceed
that at the half by more than a step. No bound depends on the server's size: its weights would hide a leak. Samples of a
few minutes prove nothing about an hour.

The trend is Theil and Sen's slope, the median of the slopes between all pairs of points: a minority of outliers (a
burst, a garbage collection) doesn't change it. Its interval assumes independent points, which neighbouring samples
aren't quite, so it is slightly too narrow; the bounds are wide. It doesn't see a jump near the end either, hence the
comparison of the levels of the first and last tenth.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llama_engine.observability.metrics import REASONS
from scipy.stats import theilslopes

from perf.soak.observed import Sample, Soaked

_CLOSED = 1
"""Requests, at a restart, that may have been connected in the moment when the server was ended."""
CONFIDENCE = 0.95
FEWEST_POINTS = 8
MOST_POINTS = 1000
"""Points of which all pairs are formed; of more, evenly spaced ones."""
SHORTEST_S = 570.0
"""Seconds of samples that prove something about an hour: the second half of a soak of 20 minutes."""

Outcome = Literal["ok", "failed", "can't be told", "left out"]
"""A soak with a condition that can't be told doesn't pass; one that is left out doesn't count."""


@dataclass(frozen=True)
class Trend:
    """level: the median. slope: per hour, with its interval. seconds: from the first to the last point.

    change: from the median of the first tenth of the points to that of the last tenth.
    """

    level: float
    slope: float
    low: float
    high: float
    seconds: float
    change: float

    @classmethod
    def of(cls, seconds: Sequence[float], values: Sequence[float]) -> Trend:
        """Fit values over seconds. Raises ValueError for fewer than FEWEST_POINTS."""
        if len(values) < FEWEST_POINTS:
            raise ValueError(f"{len(values)} points are too few for a trend; {FEWEST_POINTS} at least")
        step = -(-len(values) // MOST_POINTS)
        found = theilslopes(values[::step], seconds[::step], alpha=CONFIDENCE)
        slope, low, high = (float(value) * 3600 for value in (found.slope, found.low_slope, found.high_slope))
        tenth = max(1, len(values) // 10)
        change = statistics.median(values[-tenth:]) - statistics.median(values[:tenth])
        return cls(statistics.median(values), slope, low, high, seconds[-1] - seconds[0], change)


@dataclass(frozen=True)
class Finding:
    """A condition's outcome. said: the figure and its bound, or the reason. trend: of a figure that must not grow."""

    name: str
    outcome: Outcome
    said: str
    trend: Trend | None = None


@dataclass(frozen=True)
class Figure:
    """A figure that must not grow. column: of `Sample.figures`, which lacks it where the machine does.

    per_hour: allowed growth per hour. step: allowed difference between the half and the end, however long that is.
    """

    name: str
    unit: str
    column: str
    per_hour: float
    step: float


FIGURES = (
    # At 10 requests per second, a kilobyte of each is 35 MiB per hour.
    Figure("memory of tritonserver", " MiB", "triton_rss_mib", 32.0, 8.0),
    Figure("memory of the model's process", " MiB", "model_rss_mib", 32.0, 8.0),
    Figure("shared memory", " MiB", "shared_memory_mib", 32.0, 8.0),
    # PyTorch allocates blocks of 2 and 20 MiB, and other processes may use the GPU.
    Figure("memory of the GPU", " MiB", "vram_mib", 64.0, 32.0),
    # Users disconnect and connect all the time.
    Figure("descriptors of tritonserver", "", "triton_descriptors", 64.0, 16.0),
    Figure("descriptors of the model's process", "", "model_descriptors", 16.0, 4.0),
    Figure("threads of tritonserver", "", "triton_threads", 32.0, 8.0),
    Figure("threads of the model's process", "", "model_threads", 16.0, 4.0),
    Figure("memory of the OpenAI endpoint", " MiB", "endpoint_rss_mib", 32.0, 8.0),
    Figure("descriptors of the OpenAI endpoint", "", "endpoint_descriptors", 64.0, 16.0),
    Figure("threads of the OpenAI endpoint", "", "endpoint_threads", 32.0, 8.0),
)


def judge(soaked: Soaked) -> list[Finding]:
    """Return every finding."""
    figures = (_flat(figure, soaked.second_halves(figure.column.startswith("endpoint_"))) for figure in FIGURES)
    return [*_behaviour(soaked), *_counts(soaked), *figures]


def passed(findings: Sequence[Finding]) -> bool:
    """Return whether the soak passed."""
    return all(finding.outcome in ("ok", "left out") for finding in findings)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the verdict in a line, with the numbers of failed and of undecided conditions."""
    number = Counter(finding.outcome for finding in findings)
    unknown, of_all = number["can't be told"], len(findings)
    if number["failed"]:
        line = f"FAILED: {number['failed']} of {of_all}"
        return f"{line}; {unknown} can't be told and aren't counted" if unknown else line
    if unknown:
        return f"NOT PASSED: {unknown} of {of_all} can't be told and aren't counted, none of the others failed"
    return "passed"


def lines(findings: Sequence[Finding]) -> str:
    """Return a line per finding, and the verdict."""
    width = max(len(finding.name) for finding in findings)
    marks = {"ok": "ok  ", "failed": "FAIL", "can't be told": "?   ", "left out": "-   "}
    shown = {"can't be told": "can't be told: ", "left out": "left out: "}
    each = [f"{marks[one.outcome]} {one.name:<{width}}  {shown.get(one.outcome, '')}{one.said}" for one in findings]
    return "\n".join([*each, verdict(findings)])


def _flat(figure: Figure, halves: Sequence[Sequence[Sample]]) -> Finding:
    """Judge each life that is long enough; the finding is the worst one's."""
    seen = [[sample for sample in half if figure.column in sample.figures] for half in halves]
    if any(halves) and not any(seen):
        return Finding(figure.name, "left out", "there is none")
    judged = [_flat_in_a_life(figure, half) for half in seen] or [_flat_in_a_life(figure, [])]
    told = [one for one in judged if one.outcome != "can't be told"]
    if not told:
        return max(judged, key=lambda one: one.trend.seconds if one.trend else 0.0)
    worst = max(told, key=lambda one: (one.outcome == "failed", one.trend.high if one.trend else 0.0))
    if len(judged) == 1:
        return worst
    return replace(worst, said=f"{worst.said}; the worst of {len(told)} lives, {len(judged) - len(told)} too short")


def _flat_in_a_life(figure: Figure, samples: Sequence[Sample]) -> Finding:
    try:
        trend = Trend.of([sample.seconds for sample in samples], [sample.figures[figure.column] for sample in samples])
    except ValueError as error:
        return Finding(figure.name, "can't be told", str(error))
    unit = figure.unit
    said = (
        f"{trend.level:,.1f}{unit}, {trend.slope:+,.1f}{unit} per hour ({trend.low:+,.1f} to {trend.high:+,.1f} "
        f"with {CONFIDENCE:.0%} confidence; {figure.per_hour:g} allowed), {trend.change:+,.1f}{unit} by the end "
        f"({figure.step:g} allowed)"
    )
    if trend.seconds < SHORTEST_S:
        too_short = f"{trend.seconds:.0f} s of samples, {SHORTEST_S:g} at least; {said}"
        return Finding(figure.name, "can't be told", too_short, trend)
    flat = trend.high <= figure.per_hour and trend.change <= figure.step
    return Finding(figure.name, "ok" if flat else "failed", said, trend)


def _holds(name: str, holds: bool, said: str, otherwise: Outcome = "failed") -> Finding:
    return Finding(name, "ok" if holds else otherwise, said)


def _behaviour(soaked: Soaked) -> Iterator[Finding]:
    tally = soaked.tally
    # A soak that was cut short isn't to blame for what it didn't reach.
    missing: Outcome = "can't be told" if soaked.cut_short else "failed"
    errors = [f"{count} x {message}" for message, count in tally.errors.most_common(3)]
    yield _holds("errors", not errors, "; ".join([f"{tally.errors.total()} unexpected", *errors]))
    texts = f"{tally.same:,} times the same text, {tally.different:,} times another one"
    if soaked.rows_depend:
        depend = f"rows depend on their batch with an outlier threshold: {texts}"
        yield Finding("the fixed request", "left out", depend)
    else:
        same = bool(tally.same) and not tally.different
        yield _holds("the fixed request", same, texts, "failed" if tally.different else missing)
    idle = [kind for kind in soaked.kinds if not tally.done[kind]]
    done = ", ".join(f"{tally.done[kind]:,} {kind}" for kind in soaked.kinds)
    yield _holds("everything was done", not idle, done, missing)
    busy = [rest for rest in soaked.rests if any(rest.levels.values())]
    first = f", first after {busy[0].seconds:.0f} s: {busy[0].levels}" if busy else ""
    rests = f"{len(busy)} of {len(soaked.rests)} with rows in the server{first}"
    yield _holds("rests", bool(soaked.rests) and not busy, rests, "failed" if busy else missing)
    if soaked.course.restart_seconds is not None:
        yield _restarts(soaked, missing)
    ended = "the same ones at the end" if soaked.same_processes else "others at the end than at first"
    yield _holds("processes", soaked.same_processes and not soaked.cut_short, soaked.cut_short or ended)


def _restarts(soaked: Soaked, missing: Outcome) -> Finding:
    """A restart must answer what runs, end with code 0 and leave no shared memory."""
    restarts = soaked.restarts
    running, answered = (sum(getattr(one, name) for one in restarts) for name in ("running", "answered"))
    parts = Counter(one.part for one in restarts)
    bad = [
        one for one in restarts if one.answered < one.running or one.code != 0 or one.regions or one.closed > _CLOSED
    ]
    knocks, away, closed = (sum(getattr(one, name) for one in restarts) for name in ("knocks", "turned_away", "closed"))
    said = (
        f"{parts['server']} of the server, {parts['endpoint']} of the endpoint: {answered} of {running} running "
        f"requests answered, {away} of {knocks} turned away meanwhile, {closed} closed, the others "
        f"answered; {max((one.end_seconds for one in restarts), default=0):.1f} s to end at most"
    )
    if bad:
        return Finding("restarts", "failed", f"{said}; first wrong one: {bad[0]}")
    return _holds("restarts", running > 0, said, missing)


def _counts(soaked: Soaked) -> Iterator[Finding]:
    """Compare the server's counts with the users'; an abandoned request may have been completed or not."""
    if any(life.after is None for life in soaked.lives):
        for name in ("rows", "refusals", "tokens", "computations"):
            yield Finding(name, "can't be told", "the server was gone at the end")
        return
    tally = soaked.counted
    completed = tally.completed.total()
    ended = {reason: soaked.grown("llama_requests_total", finish_reason=reason) for reason in REASONS}
    rows = ended["stop"] + ended["length"] + ended["cancelled"]
    as_seen = all(tally.completed[reason] <= ended[reason] for reason in ("stop", "length"))
    yield _holds(
        "rows",
        completed <= rows <= completed + tally.left and as_seen,
        f"{rows:,.0f} ended in the server, {ended['cancelled']:,.0f} of them cancelled; "
        f"{completed:,} seen by users, who left {tally.left:,}",
    )
    yield _holds(
        "refusals",
        ended["invalid"] == tally.refused and not ended["unavailable"] and not ended["error"],
        f"{ended['invalid']:,.0f} invalid ({tally.refused:,} were), {ended['unavailable']:,.0f} unavailable, "
        f"{ended['error']:,.0f} errors",
    )
    generated = soaked.grown("llama_generated_tokens_total")
    chosen = soaked.grown("llama_step_rows_sum")
    yield _holds(
        "tokens",
        generated == chosen and tally.output_tokens <= generated <= tally.output_tokens + tally.left_tokens,
        f"{generated:,.0f} generated, {chosen:,.0f} chosen in steps; {tally.output_tokens:,} came, "
        f"at most {tally.left_tokens:,} were left",
    )
    failed = soaked.grown("llama_step_errors_total")
    yield _holds("computations", not failed, f"{failed:,.0f} failed")
