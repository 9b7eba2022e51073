"""How a soak goes: for how long, with how many users, and how the weather changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Course:
    """One soak. Rounds of steady load, a burst and a rest follow each other until the time is over.

    seconds: for all rounds together; the last one is finished. users: who act at the same time. thinking_seconds: of a
    user between two actions in steady load, on average; in a burst nobody thinks. rest_seconds: from when nobody is
    served any more. sample_seconds: between two looks at the server. seed: of everything that is drawn. late_rounds:
    that follow, at most, until each thing that users do has been done: how soon that is depends on the machine.
    Raises ValueError for what isn't above 0.
    """

    seconds: float
    users: int = 24
    steady_seconds: float = 40.0
    burst_seconds: float = 15.0
    rest_seconds: float = 5.0
    thinking_seconds: float = 1.5
    sample_seconds: float = 5.0
    seed: int = 1
    late_rounds: int = 10

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, must be above 0")
