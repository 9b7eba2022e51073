"""The project's aims for one H100, the measured figures, and whether each aim is met.

Requests per second are the server's where Triton ran, else the engine's own; the verdict names the measurement. An aim
without a figure is neither met nor missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Measurements = Mapping[str, Mapping[str, Any]]

DEVICE = "H100"
"""The aims follow from its bandwidth: on another device the figures are only for comparison."""
ROWS = 32

DIVERGENCE = "KL divergence from FP16 of INT8 as served, in nats: no more than that of LLM.int8(), threshold 6"
"""The only aim that is an upper bound."""

_REQUESTS = "requests_per_second"


class Figure(NamedTuple):
    """A measured value, and the keys of its measurements."""

    value: float
    source: str


def verdicts(measured: Measurements, device: str = DEVICE) -> list[dict[str, Any]]:
    """Return the aims in order, as in the result's file; on another device none is met or missed."""
    int8, fp16 = _requests(measured)
    one_row = _best(_ours(measured, f"{way}/int8/1", "tokens_per_second") for way in ("decode", "graph"))
    # The faster of stock generate()'s thresholds: the aim must hold against both.
    stock = _best(_figure(measured, f"stock/{key}/{ROWS}", _REQUESTS) for key in ("int8", "int8_outliers"))
    llm_int8, served = (_divergence(measured, key) for key in ("int8_threshold_6", "int8_fused"))
    aims = (
        ("INT8 in-flight, requests/s at 32 x 200 tokens", 24.0, int8),
        ("FP16 in-flight, requests/s at 32 x 200 tokens", 16.0, fp16),
        ("INT8 over FP16, in the same run", 1.4, _ratio(int8, fp16)),
        ("INT8, one row, tokens/s", 200.0, one_row),
        ("INT8 over stock generate() in INT8, requests/s", 8.0, _ratio(int8, stock)),
        (DIVERGENCE, llm_int8 and llm_int8.value, served),
    )
    return [
        {
            "aim": aim,
            "bound": bound,
            "measured": figure and float(f"{figure.value:.4g}"),
            "from": figure and figure.source,
            "met": _met(aim, bound, figure) if DEVICE in device else None,
        }
        for aim, bound, figure in aims
    ]


def _met(aim: str, bound: float | None, figure: Figure | None) -> bool | None:
    """Return whether the figure is within the bound; None if unknown."""
    if figure is None or bound is None:
        return None
    return figure.value <= bound if aim == DIVERGENCE else figure.value >= bound


def failures(measured: Measurements) -> list[str]:
    """Return the keys of failed checks."""
    return [key for key, found in measured.items() if found.get("passed") is False]


def table(measured: Measurements, device: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Print every verdict, then failed checks and what was not run; return the verdicts."""
    found = verdicts(measured, device)
    if DEVICE not in device:
        say(f"these aims are an {DEVICE}'s; this is {device}")
    for one in found:
        unknown = "not measured" if None in (one["measured"], one["bound"]) else "not compared"
        word = {None: unknown, True: "met", False: "NOT MET"}[one["met"]]
        limit = "at most" if one["aim"] == DIVERGENCE else "at least"
        bound = "" if one["bound"] is None else f" {limit} {one['bound']:,.4g};"
        figure = "" if one["measured"] is None else f" {one['measured']:,.4g} ({one['from']})"
        say(f"{word:12s} {one['aim']}:{bound}{figure}")
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
