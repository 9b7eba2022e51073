"""The axes of the search: which values of one setting are tried around a point, the others staying as they are.

Values are halves and doubles, because a batching setting that matters does so over a wide range. Slots come first: they
bound how much is computed together, and the preferred sizes go with them. In what order of time anything is measured is
`search.py`'s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from llama_engine.settings import BOUNDS, Integer

from perf.tune.knobs import Batcher, Knobs

Axis = Literal["slots", "prefill", "preferred", "delay"]
AXES: tuple[Axis, ...] = ("slots", "prefill", "preferred", "delay")

_SLOT_FACTORS = (0.25, 0.5, 1, 2, 4)
_PREFILL_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)
_DELAYS = (0, 1_000, 10_000, 50_000)
_SMALLEST_PREFERRED = 4

MOST_AROUND = 15
"""Points around one point, of all axes together, at most: 4 + 5 + 2 + 4."""


def around(knobs: Knobs, axis: Axis, most_at_once: int | None) -> list[Knobs]:
    """Return the points of one axis through `knobs`, itself not among them.

    most_at_once: requests that the load has running or waiting at most, None if it has no bound; more slots than that
    can't be filled and aren't tried.
    """
    match axis:
        case "slots":
            points = [_with_slots(knobs, slots) for slots in _slots(knobs.slots, most_at_once)]
        case "prefill":
            points = [replace(knobs, prefill_tokens=tokens) for tokens in _prefill(knobs.prefill_tokens)]
        case "preferred":
            points = [replace(knobs, batcher=batcher) for batcher in _preferred(knobs.batcher, knobs.slots)]
        case "delay":
            points = [replace(knobs, batcher=batcher) for batcher in _delays(knobs.batcher)]
    return [point for point in dict.fromkeys(points) if point != knobs]


def resized(preferred: tuple[int, ...], slots: int, new_slots: int) -> tuple[int, ...]:
    """Return preferred sizes for another number of slots, which is the largest batch there can be.

    Sizes beyond it go. Where a full batch was preferred a full one is, with the doubles on the way to it.
    """
    kept = [size for size in preferred if size < new_slots and size != slots]
    if slots in preferred:
        while kept and 2 * kept[-1] < new_slots:
            kept.append(2 * kept[-1])
        kept.append(new_slots)
    return tuple(kept) or (new_slots,)


def _slots(present: int, most_at_once: int | None) -> list[int]:
    bound = _bound("slots")
    most = bound.high if most_at_once is None else min(most_at_once, bound.high)
    return [max(bound.low, min(int(present * factor), most)) for factor in _SLOT_FACTORS]


def _prefill(present: int) -> list[int]:
    bound = _bound("prefill_tokens")
    return [max(bound.low, min(int(present * factor), bound.high)) for factor in _PREFILL_FACTORS]


def _preferred(present: Batcher | None, slots: int) -> list[Batcher]:
    """Return full batches only, which is Triton's own choice, and the doubles of 4 up to a full batch."""
    if present is None:
        return []
    doubles = [_SMALLEST_PREFERRED << power for power in range(slots.bit_length())]
    up_to_full = (*[size for size in doubles if size < slots], slots)
    return [replace(present, preferred=preferred) for preferred in ((slots,), up_to_full)]


def _delays(present: Batcher | None) -> list[Batcher]:
    return [] if present is None else [replace(present, delay_microseconds=delay) for delay in _DELAYS]


def _with_slots(knobs: Knobs, slots: int) -> Knobs:
    if knobs.batcher is None:
        return replace(knobs, slots=slots)
    preferred = resized(knobs.batcher.preferred, knobs.slots, slots)
    return replace(knobs, slots=slots, batcher=replace(knobs.batcher, preferred=preferred))


def _bound(setting: str) -> Integer:
    bound = BOUNDS[setting]
    assert isinstance(bound, Integer)
    return bound
