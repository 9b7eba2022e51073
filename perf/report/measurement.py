"""One server under one load, as it stands in a result's file."""

from __future__ import annotations

from dataclasses import dataclass

from perf.report.cells import figure
from perf.report.fields import Fields


@dataclass(frozen=True)
class Load:
    """What was sent. concurrency: of a closed loop; rate_per_second: of an open one."""

    mix: str
    concurrency: int | None
    rate_per_second: float | None
    mean_output_tokens: float

    @classmethod
    def of(cls, fields: Fields) -> Load:
        """Read a load. Raises ResultError naming the field that is missing or wrong."""
        return cls(
            mix=fields.text("mix"),
            concurrency=fields.count("concurrency") if "concurrency" in fields else None,
            rate_per_second=fields.optional_number("rate_per_second"),
            mean_output_tokens=fields.number("mean_output_tokens"),
        )

    @property
    def arrivals(self) -> str:
        """How they come, in a few words."""
        if self.rate_per_second is not None:
            return f"{figure(self.rate_per_second)} requests/s, Poisson"
        return f"{self.concurrency} requests at a time"

    @property
    def title(self) -> str:
        """The output lengths in a few words."""
        mean = f"{self.mean_output_tokens:.0f}"
        return f"all {mean}" if self.mix == "equal" else f"{self.mix}, mean {mean}"


@dataclass(frozen=True)
class Times:
    """Percentiles, in seconds."""

    p50: float
    p95: float
    p99: float
    max: float

    @property
    def milliseconds(self) -> tuple[float, float]:
        """p50 and p95."""
        return 1e3 * self.p50, 1e3 * self.p95


@dataclass(frozen=True)
class Memory:
    """kind: PSS or VRAM."""

    kind: str
    weights_mib: float | None
    process_mib: float | None


@dataclass(frozen=True)
class Limit:
    """What the device allows for this load, and the share of it that was reached. bound_by: bandwidth or operations."""

    tokens_per_second: float
    fraction: float
    bound_by: str


@dataclass(frozen=True)
class Goodput:
    """Requests answered within the objective: per second, and as a share of all."""

    first_token_s: float
    inter_token_s: float
    requests_per_second: float
    share: float


@dataclass(frozen=True)
class NotRun:
    """A server that couldn't be measured, and why."""

    title: str
    reason: str

    @classmethod
    def among(cls, fields: Fields) -> NotRun | None:
        """Return why there is nothing to read here; None where there is a measurement."""
        if "not_run" in fields:
            return cls(fields.text("title"), fields.text("not_run"))
        if "latency_ms" not in fields and fields.count("errors"):
            return cls(fields.text("title"), f"all {fields.count('errors')} requests failed")
        return None


@dataclass(frozen=True)
class Measurement:
    """What was seen; None where it doesn't apply or wasn't looked at. key: its place in the result's file.

    requests: measured ones, errors among them. stolen: share of the processors' time that the host took meanwhile.
    """

    key: str
    server: str
    title: str
    family: str
    weights: str
    load: Load
    requests: int
    errors: int
    requests_per_second: float
    tokens_per_second: float
    latency: Times
    first_token: Times | None
    inter_token: Times | None
    goodput: Goodput | None
    memory: Memory | None
    mean_rows: float | None
    mean_batch: float | None
    limit: Limit | None
    stolen: float | None

    @property
    def label(self) -> str:
        """The title with the weights, which some titles have already."""
        return self.title if self.weights in self.title else f"{self.title}, {self.weights}"

    @classmethod
    def of(cls, key: str, fields: Fields) -> Measurement:
        """Read the measurement at that key. Raises ResultError naming the field that is missing or wrong."""
        first, inter = fields.optional_part("time_to_first_token_ms"), fields.optional_part("inter_token_latency_ms")
        memory, limit = fields.optional_part("memory"), fields.optional_part("limit")
        goodput = fields.optional_part("goodput")
        return cls(
            key=key,
            server=fields.text("server"),
            title=fields.text("title"),
            family=fields.text("family"),
            weights=fields.text("weights"),
            load=Load.of(fields.part("load")),
            requests=fields.count("requests"),
            errors=fields.count("errors"),
            requests_per_second=fields.number("requests_per_second"),
            tokens_per_second=fields.number("tokens_per_second"),
            latency=_times(fields.part("latency_ms")),
            first_token=None if first is None else _times(first),
            inter_token=None if inter is None else _times(inter),
            goodput=None if goodput is None else _goodput(goodput),
            memory=None if memory is None else _memory(memory),
            mean_rows=fields.optional_number("mean_rows"),
            mean_batch=fields.optional_number("mean_batch"),
            limit=None if limit is None else _limit(limit),
            stolen=fields.optional_number("stolen_share"),
        )


def _times(fields: Fields) -> Times:
    return Times(*(fields.number(name) / 1e3 for name in ("p50", "p95", "p99", "max")))


def _memory(fields: Fields) -> Memory:
    return Memory(fields.text("kind"), fields.optional_number("weights_mib"), fields.optional_number("process_mib"))


def _limit(fields: Fields) -> Limit:
    return Limit(fields.number("tokens_per_second"), fields.number("fraction"), fields.text("bound_by"))


def _goodput(fields: Fields) -> Goodput:
    objective = fields.part("slo")
    return Goodput(
        objective.number("time_to_first_token_s"),
        objective.number("inter_token_latency_s"),
        fields.number("requests_per_second"),
        fields.number("share"),
    )
