"""What a soak comes to: each thing that must hold, with its figure and its bound, and whether it did.

Memory, descriptors and threads must not grow over the second half of the time, in two ways. Their trend's interval must
end below a bound per hour, so that what is too restless to tell doesn't pass; and their level at the end must not lie
above that at the half by more than a step. No bound depends on how large a server is: its weights would hide a leak.
Looks of a few minutes say nothing about an hour, whatever they show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llama_engine.observability.metrics import REASONS

from perf.soak.observations import Sample, Soaked
from perf.soak.trend import CONFIDENCE, Trend
from perf.soak.users import kinds

Outcome = Literal["ok", "failed", "can't be told", "left out"]
"""A soak of which something can't be told doesn't pass; what is left out doesn't matter to it."""

SHORTEST_S = 570.0
"""Of looks that say something about an hour: the second half of a soak of 20 minutes, which may begin a little late."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. said: the figure and its bound, or the reason, in words."""

    name: str
    outcome: Outcome
    said: str


@dataclass(frozen=True)
class Figure:
    """A figure that must not grow.

    of: None where a machine doesn't have it. per_hour: by how much it may. step: by how much it may lie higher at the
    end than at the half, however long that takes.
    """

    name: str
    unit: str
    of: Callable[[Sample], float | None]
    per_hour: float
    step: float

    def trend(self, samples: Sequence[Sample]) -> Trend:
        """Return how it went. Raises ValueError for too few looks."""
        seen = [(sample.seconds, value) for sample in samples if (value := self.of(sample)) is not None]
        return Trend.of([seconds for seconds, _ in seen], [value for _, value in seen])


FIGURES = (
    # At 10 requests a second a kilobyte of each is 35 MiB an hour.
    Figure("memory of tritonserver", "MiB", lambda sample: sample.vitals.triton.rss_mib, 32.0, 8.0),
    Figure("memory of the model's process", "MiB", lambda sample: sample.vitals.model.rss_mib, 32.0, 8.0),
    Figure("shared memory", "MiB", lambda sample: sample.vitals.shared_memory_mib, 32.0, 8.0),
    # PyTorch takes it in pieces of 2 and 20 MiB, and others may use the GPU.
    Figure("memory of the GPU", "MiB", lambda sample: sample.vitals.vram_mib, 64.0, 32.0),
    # Users hang up and connect again all the time, so some go up and down.
    Figure("descriptors of tritonserver", "", lambda sample: float(sample.vitals.triton.descriptors), 64.0, 16.0),
    Figure("descriptors of the model's process", "", lambda sample: float(sample.vitals.model.descriptors), 16.0, 4.0),
    Figure("threads of tritonserver", "", lambda sample: float(sample.vitals.triton.threads), 32.0, 8.0),
    Figure("threads of the model's process", "", lambda sample: float(sample.vitals.model.threads), 16.0, 4.0),
)


def judge(soaked: Soaked) -> list[Finding]:
    """Return every finding."""
    counted = _counters(soaked) if soaked.after is not None else _uncounted()
    return [*_behaviour(soaked), *counted, *growth(soaked)]


def passed(findings: Sequence[Finding]) -> bool:
    """Say whether a soak of which these are the findings has passed."""
    return all(finding.outcome in ("ok", "left out") for finding in findings)


def growth(soaked: Soaked) -> Iterator[Finding]:
    """Look at everything that must stay flat."""
    for figure in FIGURES:
        yield _flat(figure, soaked.second_half)


def _flat(figure: Figure, samples: Sequence[Sample]) -> Finding:
    if samples and all(figure.of(sample) is None for sample in samples):
        return Finding(figure.name, "left out", "this machine has none")
    try:
        trend = figure.trend(samples)
    except ValueError as error:
        return Finding(figure.name, "can't be told", str(error))
    unit = f" {figure.unit}" if figure.unit else ""
    said = (
        f"{trend.level:,.1f}{unit}, {trend.slope:+,.1f}{unit} an hour ({trend.low:+,.1f} to {trend.high:+,.1f} "
        f"with {CONFIDENCE:.0%} confidence; {figure.per_hour:g} allowed), {trend.change:+,.1f}{unit} by the end "
        f"({figure.step:g} allowed)"
    )
    if trend.seconds < SHORTEST_S:
        return Finding(figure.name, "can't be told", f"{trend.seconds:.0f} s of looks, {SHORTEST_S:g} at least; {said}")
    return Finding(figure.name, _holds(trend.high <= figure.per_hour and trend.change <= figure.step), said)


def _holds(holds: bool) -> Outcome:
    return "ok" if holds else "failed"


def _behaviour(soaked: Soaked) -> Iterator[Finding]:
    tally = soaked.tally
    # What a soak that was cut short hasn't come to is no fault of its own.
    missing: Outcome = "can't be told" if soaked.cut_short else "failed"
    errors = [f"{count} x {message}" for message, count in tally.errors.most_common(3)]
    yield Finding("errors", _holds(not errors), "; ".join([f"{tally.errors.total()} that nobody expected", *errors]))
    yield _fixed(soaked, missing)
    idle = [kind for kind in kinds(soaked.streams) if not tally.done[kind]]
    done = ", ".join(f"{tally.done[kind]:,} {kind}" for kind in kinds(soaked.streams))
    yield Finding("everything was done", missing if idle else "ok", done)
    busy = [rest for rest in soaked.rests if any(rest.levels.values())]
    first = f", first after {busy[0].seconds:.0f} s: {busy[0].levels}" if busy else ""
    yield Finding(
        "rests",
        _holds(not busy) if soaked.rests else missing,
        f"{len(busy)} of {len(soaked.rests)} with rows in the server{first}",
    )
    same = "the same ones at the end" if soaked.same_processes else "others at the end than at first"
    yield Finding("processes", _holds(soaked.same_processes and not soaked.cut_short), soaked.cut_short or same)


def _fixed(soaked: Soaked, missing: Outcome) -> Finding:
    name, tally = "the fixed request", soaked.tally
    said = f"{tally.same:,} times the same text, {tally.different:,} times another one"
    if soaked.rows_depend:
        return Finding(name, "left out", f"rows depend on their batch with an outlier threshold: {said}")
    if not tally.same and not tally.different:
        return Finding(name, missing, said)
    return Finding(name, _holds(not tally.different), said)


def _uncounted() -> Iterator[Finding]:
    for name in ("rows", "refusals", "tokens", "computations"):
        yield Finding(name, "can't be told", "nobody was left to be asked at the end")


def _counters(soaked: Soaked) -> Iterator[Finding]:
    """Compare what the server counted with what its users saw; what a user left may have been completed or not."""
    tally = soaked.tally
    completed = tally.completed.total()
    ended = {reason: soaked.grown("llama_requests_total", finish_reason=reason) for reason in REASONS}
    rows = ended["stop"] + ended["length"] + ended["cancelled"]
    yield Finding(
        "rows",
        _holds(
            completed <= rows <= completed + tally.left
            and all(tally.completed[reason] <= ended[reason] for reason in ("stop", "length"))
        ),
        f"{rows:,.0f} ended in the server, {ended['cancelled']:,.0f} of them cancelled; "
        f"{completed:,} seen by users, who left {tally.left:,}",
    )
    yield Finding(
        "refusals",
        _holds(ended["invalid"] == tally.refused and not ended["unavailable"] and not ended["error"]),
        f"{ended['invalid']:,.0f} invalid ({tally.refused:,} were), {ended['unavailable']:,.0f} unavailable, "
        f"{ended['error']:,.0f} errors",
    )
    generated = soaked.grown("llama_generated_tokens_total")
    chosen = soaked.grown("llama_step_rows_sum")
    yield Finding(
        "tokens",
        _holds(generated == chosen and tally.output_tokens <= generated <= tally.output_tokens + tally.left_tokens),
        f"{generated:,.0f} generated, {chosen:,.0f} chosen in steps; {tally.output_tokens:,} came, "
        f"at most {tally.left_tokens:,} were left",
    )
    failed = soaked.grown("llama_step_errors_total")
    yield Finding("computations", _holds(not failed), f"{failed:,.0f} failed")
