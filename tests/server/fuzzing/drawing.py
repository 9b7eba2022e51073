"""Draws attacks with Hypothesis, and shrinks one that has found something.

The same seed, count and sources give the same attacks (Hypothesis uses constants of the loaded modules).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.strategies import SearchStrategy
from server.fuzzing.attacks import Attack
from server.fuzzing.documented import documented_calls
from server.fuzzing.grpc_attacks import grpc_calls, grpc_controls, grpc_noise
from server.fuzzing.http_attacks import http_controls, http_noise, http_requests
from server.fuzzing.values import weighted

_DRAWN = settings(
    phases=[Phase.generate],
    database=None,
    verbosity=Verbosity.quiet,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class Batch:
    """Attacks drawn together from a seed."""

    strategy: SearchStrategy[Attack]
    seed: int
    attacks: Sequence[Attack]


def all_attacks(unary: str, documented: int = 3) -> SearchStrategy[Attack]:
    """Return attacks of every kind.

    unary: the model that answers /infer and ModelInfer. documented: of about 45 attacks; their strategies take seconds
    to build.
    """
    return weighted(
        (16, http_requests(unary)),
        (16, grpc_calls(unary)),
        (2, http_controls()),
        (2, grpc_controls),
        (documented, documented_calls(unary)),
        (3, http_noise),
        (3, grpc_noise),
    )


def drawn(strategy: SearchStrategy[Attack], count: int, number: int) -> Batch:
    """Return a batch. number: its seed."""
    found: list[Attack] = []

    @seed(number)
    @settings(_DRAWN, max_examples=count)
    @given(strategy)
    def draw(attack: Attack) -> None:
        found.append(attack)

    draw()
    return Batch(strategy, number, found)


def shrunk(batch: Batch, found: Attack, still: Callable[[Attack], bool]) -> str:
    """Draw a batch again up to the attack found, and shrink it; return the smallest one and how to reproduce it.

    still: sends an attack, alone, and returns whether it has the same fault.
    """
    reached = False
    smallest = found

    @seed(batch.seed)
    @settings(_DRAWN, max_examples=len(batch.attacks), phases=[Phase.generate, Phase.shrink])
    @given(batch.strategy)
    def again(attack: Attack) -> None:
        nonlocal reached, smallest
        reached = reached or attack == found
        if reached and still(attack):
            smallest = attack
            raise AssertionError

    try:
        again()
    except AssertionError as error:
        # Hypothesis tries the smallest one last, and notes how to draw it.
        return "\n".join([repr(smallest), *(note for note in error.__notes__ if "@reproduce_failure" in note)])
    return f"{found!r}, which alone has no fault"
