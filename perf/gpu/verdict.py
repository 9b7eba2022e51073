"""The project's aims for one H100, the measured figures, and whether each aim is met.

Requests per second are the server's where Triton ran, else the engine's own; the verdict names the measurement. An aim
without a figure is neither met nor missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Measurements = Mapping[str, Mapping[str, Any]]

DEVICE = "H100"
"""The aims follow from its bandwidth: on another device the figures are only for comparison."""
ROWS = 32

_REQUESTS = "requests_per_second"


@dataclass(frozen=True)
class Figure:
    """A measured value, and the keys of its measurements."""

    value: float
    source: str


@dataclass(frozen=True)
class Verdict:
    """An aim and its figure. bound: None if it wasn't measured. comparable: measured on the aims' device."""

    aim: str
    bound: float | None
    figure: Figure | None
    least: bool = True
    comparable: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the figure is within the bound; None if unknown."""
        if self.figure is None or self.bound is None or not self.comparable:
            return None
        return self.figure.value >= self.bound if self.least else self.figure.value <= self.bound

    def to_json(self) -> dict[str, object]:
        """Return the result file's entry."""
        return {
            "aim": self.aim,
            "bound": self.bound,
            "measured": None if self.figure is None else float(f"{self.figure.value:.4g}"),
            "from": None if self.figure is None else self.figure.source,
            "met": self.met,
        }

    def line(self) -> str:
        """Return a line for a terminal."""
        unknown = "not measured" if self.figure is None or self.bound is None else "not compared"
        word = {None: unknown, True: "met", False: "NOT MET"}[self.met]
        figure = "" if self.figure is None else f" {self.figure.value:,.4g} ({self.figure.source})"
        bound = "" if self.bound is None else f" {'at least' if self.least else 'at most'} {self.bound:,.4g};"
        return f"{word:12s} {self.aim}:{bound}{figure}"


def verdicts(measured: Measurements, device: str = DEVICE) -> list[Verdict]:
    """Return the aims in order; on another device none is met or missed."""
    int8, fp16 = _requests(measured)
    one_row = _best(_ours(measured, f"{way}/int8/1", "tokens_per_second") for way in ("decode", "graph"))
    # The faster of stock generate()'s thresholds: the aim must hold against both.
    stock = _best(_figure(measured, f"stock/{key}/{ROWS}", _REQUESTS) for key in ("int8", "int8_outliers"))
    bound = _divergence(measured, "int8_threshold_6")
    found = [
        Verdict("INT8 in-flight, requests/s at 32 x 200 tokens", 24.0, int8),
        Verdict("FP16 in-flight, requests/s at 32 x 200 tokens", 16.0, fp16),
        Verdict("INT8 over FP16, in the same run", 1.4, _ratio(int8, fp16)),
        Verdict("INT8, one row, tokens/s", 200.0, one_row),
        Verdict("INT8 over stock generate() in INT8, requests/s", 8.0, _ratio(int8, stock)),
        Verdict(
            "KL divergence from FP16 of INT8 as served, in nats: no more than that of LLM.int8(), threshold 6",
            None if bound is None else bound.value,
            _divergence(measured, "int8_fused"),
            least=False,
        ),
    ]
    return found if DEVICE in device else [replace(one, comparable=False) for one in found]


def failures(measured: Measurements) -> list[str]:
    """Return the keys of failed checks."""
    return [key for key, found in measured.items() if found.get("passed") is False]


def table(measured: Measurements, device: str, say: Callable[[str], None]) -> Sequence[Verdict]:
    """Print every verdict, then failed checks and what was not run; return the verdicts."""
    found = verdicts(measured, device)
    if DEVICE not in device:
        say(f"these aims are an {DEVICE}'s; this is {device}")
    for one in found:
        say(one.line())
    for key in failures(measured):
        say(f"NOT PASSED   {key}: {measured[key].get('in_short', '')}")
    for key, entry in measured.items():
        if "not_run" in entry:
            say(f"not run      {key}: {entry['not_run']}")
    return found


def _requests(measured: Measurements) -> tuple[Figure | None, Figure | None]:
    """Return INT8's and FP16's requests/s, measured in the same way, because one is divided by the other.

    The server's if it served both, else the engine's with CUDA graphs, else with launched steps.
    """
    ways = ("article/equal/inflight_{}_quick", f"graph/{{}}/{ROWS}", f"decode/{{}}/{ROWS}")
    pairs = [
        (_ours(measured, way.format("int8"), _REQUESTS), _ours(measured, way.format("fp16"), _REQUESTS)) for way in ways
    ]
    return next((pair for pair in pairs if None not in pair), pairs[-1])


def _ours(measured: Measurements, key: str, name: str) -> Figure | None:
    """Return a figure of the engine's own kernels; a fallback to stock kernels doesn't count for an aim."""
    fell_back = "stock kernels" in measured.get(key, {}).get("steps", "")
    return None if fell_back else _figure(measured, key, name)


def _divergence(measured: Measurements, key: str) -> Figure | None:
    found = measured.get(f"quality/{key}", {}).get("kl_nats")
    return Figure(float(found["mean"]), f"quality/{key}") if isinstance(found, Mapping) else None


def _best(found: Iterable[Figure | None]) -> Figure | None:
    return max((one for one in found if one is not None), key=lambda one: one.value, default=None)


def _figure(measured: Measurements, key: str, name: str) -> Figure | None:
    found = measured.get(key, {}).get(name)
    return Figure(float(found), key) if isinstance(found, int | float) else None


def _ratio(one: Figure | None, other: Figure | None) -> Figure | None:
    if one is None or other is None or not other.value:
        return None
    return Figure(one.value / other.value, f"{one.source} over {other.source}")
