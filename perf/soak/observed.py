"""The course of a soak, and its observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perf.soak.resources import Readings
from perf.soak.tally import Tally

Sample = dict[str, Any]
"""The server at one moment: seconds since the start; phase; life and endpoint_life, restarts of the server and of the
endpoint until then; what `resources.of` reads; the server's metrics slots_in_use, waiting and pending; and since the
previous sample tokens_per_second, answers and, if there were any, p95_ms."""


@dataclass(frozen=True)
class Course:
    """One soak's load.

    seconds: of all rounds; the last one is completed. thinking_seconds: mean pause of a user between two actions in the
    steady phase; none in a burst. rest_seconds: from when the server is idle. sample_seconds: between two samples.
    late_rounds: further rounds at most until every kind of action, and with restarts one of each part, has been done,
    which takes longer on slow machines. restart_seconds: between two restarts, of the server and of the endpoint in
    turn, with requests running; None: none.
    """

    seconds: float
    users: int = 24
    steady_seconds: float = 40.0
    burst_seconds: float = 15.0
    rest_seconds: float = 5.0
    thinking_seconds: float = 1.5
    sample_seconds: float = 5.0
    late_rounds: int = 10
    restart_seconds: float | None = None


@dataclass
class Life:
    """One server from its start to its end, or to the last rest before that: its metrics and the users' counts.

    after is None if the server was gone before a rest.
    """

    before: Readings
    after: Readings | None = None
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Soaked:
    """The observations of a soak, complete or as far as it came.

    kinds: of the users' actions. lives: of the servers, one after the other. rows_depend: on their batch, as the model
    reports of its weights. rests: the seconds since the start, and the metrics that should be 0. restarts: what
    `restart` returns, and its seconds. same_processes: in every life, at the end as at the start. cut_short: why the
    soak ended early.
    """

    course: Course
    kinds: Sequence[str]
    lives: list[Life]
    rows_depend: bool = False
    samples: list[Sample] = field(default_factory=list)
    rests: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    same_processes: bool = True
    cut_short: str = ""
