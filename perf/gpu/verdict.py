"""Each aim of the project for one H100, the figure that was measured, and whether that is enough. Knows only figures.

Requests per second are the server's where Triton could be run, else the engine's own, and the verdict says which. An
aim whose figure wasn't measured is neither met nor missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Measurements = Mapping[str, Mapping[str, Any]]

DEVICE = "H100"
"""The aims are computed from its bandwidth: on another device they are figures to compare with."""
ROWS = 32


@dataclass(frozen=True)
class Figure:
    """A measured value, and the keys of the measurements that it is made of."""

    value: float
    source: str


@dataclass(frozen=True)
class Verdict:
    """bound: None where what it is held against wasn't measured. met: None where it can't be told."""

    aim: str
    bound: float | None
    figure: Figure | None
    least: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the figure is within the bound."""
        if self.figure is None or self.bound is None:
            return None
        return self.figure.value >= self.bound if self.least else self.figure.value <= self.bound

    def to_json(self) -> dict[str, object]:
        """Return it for a result's file."""
        return {
            "aim": self.aim,
            "bound": self.bound,
            "measured": None if self.figure is None else float(f"{self.figure.value:.4g}"),
            "from": None if self.figure is None else self.figure.source,
            "met": self.met,
        }

    def line(self) -> str:
        """Return it as a line of a terminal."""
        word = {None: "not measured", True: "met", False: "NOT MET"}[self.met]
        figure = "" if self.figure is None else f" {self.figure.value:,.4g} ({self.figure.source})"
        bound = "" if self.bound is None else f" {'at least' if self.least else 'at most'} {self.bound:,.4g};"
        return f"{word:12s} {self.aim}:{bound}{figure}"


def verdicts(measured: Measurements) -> list[Verdict]:
    """Return every aim's, in the order in which they are stated."""
    int8, fp16 = _requests(measured, "int8"), _requests(measured, "fp16")
    bound = _divergence(measured, "int8_threshold_6")
    return [
        Verdict("INT8 in-flight, requests/s at 32 x 200 tokens", 24.0, int8),
        Verdict("FP16 in-flight, requests/s at 32 x 200 tokens", 16.0, fp16),
        Verdict("INT8 over FP16, in the same run", 1.4, _ratio(int8, fp16)),
        Verdict("INT8, one row, tokens/s", 200.0, _figure(measured, "decode/int8/1", "tokens_per_second")),
        Verdict("INT8 over stock generate() in INT8, requests/s", 8.0, _ratio(int8, _stock(measured))),
        Verdict(
            "KL divergence from FP16 of INT8 as served, in nats: no more than that of LLM.int8(), threshold 6",
            None if bound is None else bound.value,
            _divergence(measured, "int8_threshold_0"),
            least=False,
        ),
    ]


def failures(measured: Measurements) -> list[str]:
    """Return the keys of what was checked and not passed."""
    return [key for key, found in measured.items() if found.get("passed") is False]


def _requests(measured: Measurements, weights: str) -> Figure | None:
    """Return the server's figure, the better one of its kernels; else the engine's own."""
    keys = (f"article/equal/inflight_{weights}", f"article/equal/inflight_{weights}_fused")
    found = [_figure(measured, key, "requests_per_second") for key in keys]
    served = max((one for one in found if one is not None), key=lambda one: one.value, default=None)
    return served or _figure(measured, f"decode/{weights}/{ROWS}", "requests_per_second")


def _stock(measured: Measurements) -> Figure | None:
    """Return the faster one of stock generate()'s thresholds: what is aimed at must hold against both."""
    found = [_figure(measured, f"stock/{key}/{ROWS}", "requests_per_second") for key in ("int8", "int8_outliers")]
    return max((one for one in found if one is not None), key=lambda one: one.value, default=None)


def _divergence(measured: Measurements, key: str) -> Figure | None:
    found = measured.get(f"quality/{key}", {}).get("kl_nats")
    return Figure(float(found["mean"]), f"quality/{key}") if isinstance(found, Mapping) else None


def _figure(measured: Measurements, key: str, name: str) -> Figure | None:
    found = measured.get(key, {}).get(name)
    return Figure(float(found), key) if isinstance(found, int | float) else None


def _ratio(one: Figure | None, other: Figure | None) -> Figure | None:
    if one is None or other is None or not other.value:
        return None
    return Figure(one.value / other.value, f"{one.source} over {other.source}")


def table(measured: Measurements, device: str, say: Callable[[str], None]) -> Sequence[Verdict]:
    """Say every verdict in a line, then what wasn't passed; return the verdicts."""
    found = verdicts(measured)
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
