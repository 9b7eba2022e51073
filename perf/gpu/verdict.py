"""Each aim of the project for one H100, the figure that was measured, and whether that is enough. Knows only figures.

Requests per second are the server's where Triton could be run, else the engine's own, and the verdict says which. An
aim whose figure wasn't measured is neither met nor missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Measurements = Mapping[str, Mapping[str, Any]]

DEVICE = "H100"
"""The aims are computed from its bandwidth: on another device they are figures to compare with."""
ROWS = 32

_STOCK = "stock kernels"
_REQUESTS = "requests_per_second"


@dataclass(frozen=True)
class Figure:
    """A measured value, and the keys of the measurements that it is made of."""

    value: float
    source: str


@dataclass(frozen=True)
class Verdict:
    """bound: None where what it is held against wasn't measured. met: None where it can't be told.

    comparable: whether it was measured on the device that the aim is of.
    """

    aim: str
    bound: float | None
    figure: Figure | None
    least: bool = True
    comparable: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the figure is within the bound."""
        if self.figure is None or self.bound is None or not self.comparable:
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
        unknown = "not measured" if self.figure is None or self.bound is None else "not told"
        word = {None: unknown, True: "met", False: "NOT MET"}[self.met]
        figure = "" if self.figure is None else f" {self.figure.value:,.4g} ({self.figure.source})"
        bound = "" if self.bound is None else f" {'at least' if self.least else 'at most'} {self.bound:,.4g};"
        return f"{word:12s} {self.aim}:{bound}{figure}"


def verdicts(measured: Measurements, device: str = DEVICE) -> list[Verdict]:
    """Return every aim's, in the order in which they are stated; on another device none of them is met or missed."""
    int8, fp16 = _requests(measured)
    bound = _divergence(measured, "int8_threshold_6")
    found = [
        Verdict("INT8 in-flight, requests/s at 32 x 200 tokens", 24.0, int8),
        Verdict("FP16 in-flight, requests/s at 32 x 200 tokens", 16.0, fp16),
        Verdict("INT8 over FP16, in the same run", 1.4, _ratio(int8, fp16)),
        Verdict(
            "INT8, one row, tokens/s",
            200.0,
            _better(*(_ours(measured, f"{way}/int8/1", "tokens_per_second") for way in ("decode", "graph"))),
        ),
        Verdict("INT8 over stock generate() in INT8, requests/s", 8.0, _ratio(int8, _stock(measured))),
        Verdict(
            "KL divergence from FP16 of INT8 as served, in nats: no more than that of LLM.int8(), threshold 6",
            None if bound is None else bound.value,
            _divergence(measured, "int8_fused"),
            least=False,
        ),
    ]
    return found if DEVICE in device else [replace(one, comparable=False) for one in found]


def failures(measured: Measurements) -> list[str]:
    """Return the keys of what was checked and not passed."""
    return [key for key, found in measured.items() if found.get("passed") is False]


def _requests(measured: Measurements) -> tuple[Figure | None, Figure | None]:
    """Return INT8's and FP16's, measured in one way, since one is divided by the other: as quickly as it goes.

    The server's, if it served both so; else the engine's, with both replayed, else with both launched.
    """
    ways = ("article/equal/inflight_{}_quick", f"graph/{{}}/{ROWS}", f"decode/{{}}/{ROWS}")
    pairs = [
        (_ours(measured, way.format("int8"), _REQUESTS), _ours(measured, way.format("fp16"), _REQUESTS)) for way in ways
    ]
    return next((pair for pair in pairs if None not in pair), pairs[-1])


def _ours(measured: Measurements, key: str, name: str) -> Figure | None:
    """Return a figure of ours if the engine's own kernels were in it: what fell back to stock ones is no aim's."""
    fell_back = _STOCK in measured.get(key, {}).get("steps", "")
    return None if fell_back else _figure(measured, key, name)


def _stock(measured: Measurements) -> Figure | None:
    """Return the faster one of stock generate()'s thresholds: what is aimed at must hold against both."""
    return _better(*(_figure(measured, f"stock/{key}/{ROWS}", _REQUESTS) for key in ("int8", "int8_outliers")))


def _divergence(measured: Measurements, key: str) -> Figure | None:
    found = measured.get(f"quality/{key}", {}).get("kl_nats")
    return Figure(float(found["mean"]), f"quality/{key}") if isinstance(found, Mapping) else None


def _better(*found: Figure | None) -> Figure | None:
    return max((one for one in found if one is not None), key=lambda one: one.value, default=None)


def _figure(measured: Measurements, key: str, name: str) -> Figure | None:
    found = measured.get(key, {}).get(name)
    return Figure(float(found), key) if isinstance(found, int | float) else None


def _ratio(one: Figure | None, other: Figure | None) -> Figure | None:
    if one is None or other is None or not other.value:
        return None
    return Figure(one.value / other.value, f"{one.source} over {other.source}")


def table(measured: Measurements, device: str, say: Callable[[str], None]) -> Sequence[Verdict]:
    """Say every verdict in a line, then what wasn't passed; return the verdicts."""
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
