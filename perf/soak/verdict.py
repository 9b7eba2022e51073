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
from typing import Literal, NamedTuple

from llama_engine.observability.metrics import REASONS
from scipy.stats import theilslopes

from perf import metrics
from perf.soak.observed import Life, Sample, Soaked

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


Point = tuple[float, float]
"""Seconds, and a figure's value then."""


class Finding(NamedTuple):
    """A condition's outcome. said: the figure and its bound, or the reason."""

    name: str
    outcome: Outcome
    said: str


FIGURES = (
    # At 10 requests per second, a kilobyte of each is 35 MiB per hour.
    ("memory of tritonserver", " MiB", "triton_rss_mib", 32.0, 8.0),
    ("memory of the model's process", " MiB", "model_rss_mib", 32.0, 8.0),
    ("shared memory", " MiB", "shared_memory_mib", 32.0, 8.0),
    # PyTorch allocates blocks of 2 and 20 MiB, and other processes may use the GPU.
    ("memory of the GPU", " MiB", "vram_mib", 64.0, 32.0),
    # Users disconnect and connect all the time.
    ("descriptors of tritonserver", "", "triton_descriptors", 64.0, 16.0),
    ("descriptors of the model's process", "", "model_descriptors", 16.0, 4.0),
    ("threads of tritonserver", "", "triton_threads", 32.0, 8.0),
    ("threads of the model's process", "", "model_threads", 16.0, 4.0),
    ("memory of the OpenAI endpoint", " MiB", "endpoint_rss_mib", 32.0, 8.0),
    ("descriptors of the OpenAI endpoint", "", "endpoint_descriptors", 64.0, 16.0),
    ("threads of the OpenAI endpoint", "", "endpoint_threads", 32.0, 8.0),
)
"""Figures that must not grow: name, unit, key of a sample, which lacks it where the machine does, allowed growth per
hour, and allowed difference between the half and the end, however long that is."""


def judge(soaked: Soaked) -> list[Finding]:
    """Return every finding."""
    figures = [
        _flat(name, unit, per_hour, step, second_halves(soaked.samples, key))
        for name, unit, key, per_hour, step in FIGURES
    ]
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


def second_halves(samples: Sequence[Sample], key: str) -> list[list[Point]]:
    """Return the figure of this key in the second half of each life of a process, when it has warmed up."""
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample["endpoint_life" if key.startswith("endpoint_") else "life"], []).append(sample)
    middles = {number: (life[0]["seconds"] + life[-1]["seconds"]) / 2 for number, life in lives.items()}
    return [
        [(one["seconds"], one[key]) for one in life if one["seconds"] >= middles[number] and key in one]
        for number, life in lives.items()
    ]


def _flat(name: str, unit: str, per_hour: float, step: float, lives: Sequence[Sequence[Point]]) -> Finding:
    """Judge each life that is long enough; the finding is the worst one's."""
    if lives and not any(lives):
        return Finding(name, "left out", "there is none")
    seconds = [life[-1][0] - life[0][0] if len(life) >= FEWEST_POINTS else 0.0 for life in lives]
    trends = [trend(life) for life, its in zip(lives, seconds, strict=True) if its >= SHORTEST_S]
    if not trends:
        return Finding(name, "can't be told", f"{max(seconds, default=0.0):.0f} s of samples, {SHORTEST_S:g} at least")
    worst = max(trends, key=lambda one: (one.high > per_hour or one.change > step, one.high))
    said = (
        f"{worst.level:,.1f}{unit}, {worst.slope:+,.1f}{unit} per hour ({worst.low:+,.1f} to {worst.high:+,.1f} "
        f"with {CONFIDENCE:.0%} confidence; {per_hour:g} allowed), {worst.change:+,.1f}{unit} by the end "
        f"({step:g} allowed)"
    )
    if len(lives) > 1:
        said += f"; the worst of {len(trends)} lives, {len(lives) - len(trends)} too short"
    return _holds(name, worst.high <= per_hour and worst.change <= step, said)


class Trend(NamedTuple):
    """level: the median. slope: per hour, with its interval.

    change: from the median of the first tenth of the points to that of the last tenth.
    """

    level: float
    slope: float
    low: float
    high: float
    change: float


def trend(points: Sequence[Point]) -> Trend:
    """Fit the values over the seconds."""
    values, some = [value for _, value in points], points[:: -(-len(points) // MOST_POINTS)]
    found = theilslopes([value for _, value in some], [seconds for seconds, _ in some], alpha=CONFIDENCE)
    slope, low, high = (float(value) * 3600 for value in (found.slope, found.low_slope, found.high_slope))
    tenth = max(1, len(values) // 10)
    change = statistics.median(values[-tenth:]) - statistics.median(values[:tenth])
    return Trend(statistics.median(values), slope, low, high, change)


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
    busy = [(seconds, levels) for seconds, levels in soaked.rests if any(levels.values())]
    first = f", first after {busy[0][0]:.0f} s: {busy[0][1]}" if busy else ""
    rests = f"{len(busy)} of {len(soaked.rests)} with rows in the server{first}"
    yield _holds("rests", bool(soaked.rests) and not busy, rests, "failed" if busy else missing)
    if soaked.course.restart_seconds is not None:
        yield _restarts(soaked, missing)
    ended = "the same ones at the end" if soaked.same_processes else "others at the end than at first"
    yield _holds("processes", soaked.same_processes and not soaked.cut_short, soaked.cut_short or ended)


def _restarts(soaked: Soaked, missing: Outcome) -> Finding:
    """A restart must answer what runs, end with code 0 and leave no shared memory."""
    restarts, parts = soaked.restarts, Counter(one["part"] for one in soaked.restarts)
    bad = [
        one
        for one in restarts
        if one["answered"] < one["running"] or one["code"] != 0 or one["regions"] or one["closed"] > _CLOSED
    ]
    total: Counter[str] = Counter()
    for one in restarts:
        total.update({name: one[name] for name in ("running", "answered", "knocks", "turned_away", "closed")})
    said = (
        f"{parts['server']} of the server, {parts['endpoint']} of the endpoint: {total['answered']} of "
        f"{total['running']} running requests answered, {total['turned_away']} of {total['knocks']} turned away "
        f"meanwhile, {total['closed']} closed, the others answered; "
        f"{max((one['end_seconds'] for one in restarts), default=0):.1f} s to end at most"
    )
    if bad:
        return Finding("restarts", "failed", f"{said}; first wrong one: {bad[0]}")
    return _holds("restarts", total["running"] > 0, said, missing)


def _counts(soaked: Soaked) -> Iterator[Finding]:
    """Compare the server's counts with the users'; an abandoned request may have been completed or not."""
    if any(life.after is None for life in soaked.lives):
        for name in ("rows", "refusals", "tokens", "computations"):
            yield Finding(name, "can't be told", "the server was gone at the end")
        return

    def grown(name: str, **labels: str) -> float:
        return sum(_grown(life, name, **labels) for life in soaked.lives)

    users = sum((life.counts for life in soaked.lives), Counter())
    completed = users["stop"] + users["length"]
    ended = {reason: grown("llama_requests_total", finish_reason=reason) for reason in REASONS}
    rows = ended["stop"] + ended["length"] + ended["cancelled"]
    as_seen = all(users[reason] <= ended[reason] for reason in ("stop", "length"))
    yield _holds(
        "rows",
        completed <= rows <= completed + users["left"] and as_seen,
        f"{rows:,.0f} ended in the server, {ended['cancelled']:,.0f} of them cancelled; "
        f"{completed:,} seen by users, who left {users['left']:,}",
    )
    yield _holds(
        "refusals",
        ended["invalid"] == users["refused"] and not ended["unavailable"] and not ended["error"],
        f"{ended['invalid']:,.0f} invalid ({users['refused']:,} were), {ended['unavailable']:,.0f} unavailable, "
        f"{ended['error']:,.0f} errors",
    )
    generated, chosen = grown("llama_generated_tokens_total"), grown("llama_step_rows_sum")
    came, left = users["output_tokens"], users["left_tokens"]
    yield _holds(
        "tokens",
        generated == chosen and came <= generated <= came + left,
        f"{generated:,.0f} generated, {chosen:,.0f} chosen in steps; {came:,} came, at most {left:,} were left",
    )
    failed = grown("llama_step_errors_total")
    yield _holds("computations", not failed, f"{failed:,.0f} failed")


def _grown(life: Life, name: str, **labels: str) -> float:
    assert life.after is not None
    return metrics.total(life.after, name, **labels) - metrics.total(life.before, name, **labels)
