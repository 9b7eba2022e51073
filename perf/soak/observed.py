"""The course of a soak, and its observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from perf.soak import resources
from perf.soak.phases import Phase
from perf.soak.resources import Readings
from perf.soak.stack import Part
from perf.soak.tally import Counts, Tally

COLUMNS = (
    *("shared_memory_mib", "vram_mib"),
    *(f"{process}_{name}" for process in ("triton", "model", "endpoint") for name in resources.PROCESS),
    *("slots_in_use", "waiting", "pending", "tokens_per_second", "answers", "p95_ms"),
)
"""A sample's figures: what the server takes, its metrics, and the last three since the previous sample."""


@dataclass(frozen=True)
class Course:
    """One soak's load. Raises ValueError for a value that isn't above 0.

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
    seed: int = 1
    late_rounds: int = 10
    restart_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, must be above 0")


@dataclass(frozen=True)
class Sample:
    """The server at one moment. seconds: since the start.

    figures: by COLUMNS, without vram_mib where there is no CUDA, endpoint_* without an endpoint, and p95_ms where there
    was no answer. life, endpoint_life: restarts of the server, of the endpoint, until then.
    """

    seconds: float
    phase: Phase
    figures: Mapping[str, float]
    life: int = 0
    endpoint_life: int = 0


@dataclass(frozen=True)
class Rest:
    """The metrics in a rest that should be 0."""

    seconds: float
    levels: dict[str, float]


@dataclass(frozen=True)
class Restart:
    """A part ended as by SIGTERM with requests running, and started again.

    running: requests that the server had when it was asked to end; answered: of them, completely. knocks: requests sent
    after that, until the part was back; turned_away: of them, refused at once or not connected; closed: of them,
    connected and closed without a byte. code: of the part's
    process. regions: of shared memory that it left. end_seconds: until it had ended; seconds: of the restart, since the
    start of the soak.
    """

    part: Part
    seconds: float
    running: int
    answered: int
    knocks: int
    turned_away: int
    closed: int
    code: int | None
    regions: int
    end_seconds: float


@dataclass
class Life:
    """One server from its start to its end, or to the last rest before that: its metrics and the users' counts.

    after is None if the server was gone before a rest.
    """

    before: Readings
    after: Readings | None = None
    counts: Counts = field(default_factory=Counts)


@dataclass
class Soaked:
    """The observations of a soak, complete or as far as it came.

    lives: of the servers, one after the other. kinds: of the users' actions. same_processes: in every life, at the end
    as at the start. rows_depend: on their batch, as the model reports of its weights. cut_short: why the soak ended
    early.
    """

    course: Course
    kinds: Sequence[str]
    fixed_text: str
    lives: list[Life]
    rows_depend: bool = False
    samples: list[Sample] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    same_processes: bool = False
    cut_short: str = ""

    @property
    def seconds(self) -> float:
        """From the start to the last sample."""
        return self.samples[-1].seconds if self.samples else 0.0

    @property
    def counted(self) -> Counts:
        """The users' counts in all lives."""
        counts = Counts()
        for life in self.lives:
            counts = counts.plus(life.counts)
        return counts

    def grown(self, name: str, **labels: str) -> float:
        """Return the growth of a metric's series with these labels over all lives. Raises ValueError if unknown."""
        grown = 0.0
        for life in self.lives:
            if life.after is None:
                raise ValueError("the server was gone at the end")
            grown += life.after.total(name, **labels) - life.before.total(name, **labels)
        return grown

    def second_halves(self, endpoint: bool) -> list[list[Sample]]:
        """Return the samples of the second half of each life, when its processes have warmed up."""
        lives: dict[int, list[Sample]] = {}
        for sample in self.samples:
            lives.setdefault(sample.endpoint_life if endpoint else sample.life, []).append(sample)
        halves = []
        for life in lives.values():
            middle = (life[0].seconds + life[-1].seconds) / 2
            halves.append([sample for sample in life if sample.seconds >= middle])
        return halves
