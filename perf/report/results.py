"""Result files (perf/results/*.json), parsed once and strictly into frozen dataclasses.

Fields have the JSON keys' names. Other programs, older versions of them and people with an editor write these files: a
field that is missing or of another type raises ResultError, which names the file, the place and the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from perf.roofline.rates import DeviceRates

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "perf" / "results"

Text = Annotated[str, Field(min_length=1)]
Parsed = TypeVar("Parsed")


class ResultError(ValueError):
    """A result file that can't be read. The message names the file, the field and the value found."""


@dataclass(frozen=True)
class Load:
    """The load offered. concurrency: of a closed loop; rate_per_second: of Poisson arrivals."""

    mix: Text
    mean_output_tokens: float
    concurrency: int | None = None
    rate_per_second: float | None = None

    @property
    def title(self) -> str:
        """The distribution of output lengths, in words."""
        mean = f"{self.mean_output_tokens:.0f}"
        return f"all {mean}" if self.mix == "equal" else f"{self.mix}, mean {mean}"


@dataclass(frozen=True)
class Percentiles:
    """Percentiles in milliseconds."""

    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Memory:
    """kind: PSS or VRAM."""

    kind: Text
    weights_mib: float | None = None
    process_mib: float | None = None


@dataclass(frozen=True)
class Limit:
    """The device's limit for this load and the fraction of it that was reached. bound_by: bandwidth or operations."""

    tokens_per_second: float
    fraction: float
    bound_by: str = ""


@dataclass(frozen=True)
class Objective:
    """The objective behind goodput."""

    time_to_first_token_s: float
    inter_token_latency_s: float


@dataclass(frozen=True)
class Goodput:
    """Requests answered within the objective: per second, and as a share of all."""

    slo: Objective
    requests_per_second: float
    share: float


@dataclass(frozen=True)
class NotRun:
    """A measurement that could not be made, and why."""

    title: str
    reason: str


@dataclass(frozen=True)
class Measurement:
    """One server under one load. None: not applicable or not measured. requests: includes the errors."""

    server: Text
    title: Text
    weights: Text
    load: Load
    requests: int
    errors: int
    requests_per_second: float
    tokens_per_second: float
    latency_ms: Percentiles
    time_to_first_token_ms: Percentiles | None = None
    inter_token_latency_ms: Percentiles | None = None
    goodput: Goodput | None = None
    memory: Memory | None = None
    mean_rows: float | None = None
    mean_batch: float | None = None
    limit: Limit | None = None
    stolen_share: float | None = None

    @property
    def label(self) -> str:
        """The title with the weights, unless the title names them."""
        return self.title if self.weights in self.title else f"{self.title}, {self.weights}"


@dataclass(frozen=True)
class Part:
    """A part of an overhead account. name: its path, so `parent` is a prefix of it; a whole's parent is empty."""

    name: Text
    parent: str
    seconds: float
    share: float
    per_token_us: float

    @property
    def unit(self) -> str:
        """What the seconds are; parts of different wholes can't be compared."""
        units = {"bare engine": "s of one run", "mean request": "s of one request", "cores": "core seconds of one run"}
        return units.get(self.name.split("/")[0], "s")


@dataclass(frozen=True)
class AccountSettings:
    """The load of an overhead account."""

    requests: int
    mix: Text
    slots: int
    quantization: Text


@dataclass(frozen=True)
class AccountRun:
    """One way to process the account's load."""

    tokens_per_second: float


@dataclass(frozen=True)
class Account:
    """An overhead account. parts: each after its parent, larger ones first."""

    settings: AccountSettings
    runs: Mapping[str, AccountRun]
    parts: Sequence[Part]

    @property
    def load(self) -> str:
        """The load in words."""
        of = self.settings
        return f"{of.requests} requests of {of.mix} lengths, {of.slots} rows at a time, quantization {of.quantization}"


@dataclass(frozen=True)
class LossDifference:
    """The loss minus the first row's, nats per token."""

    mean: float
    standard_error: float


@dataclass(frozen=True)
class Divergence:
    """KL divergence from the unquantized weights, nats per token."""

    mean: float
    p99: float


@dataclass(frozen=True)
class Quality:
    """One way to store the weights. None for the unquantized reference."""

    title: Text
    weights_mib: float
    perplexity: float
    loss_difference: LossDifference | None = None
    kl_nats: Divergence | None = None
    top1_agreement: float | None = None


@dataclass(frozen=True)
class QualitySettings:
    """The text that the quality was measured on."""

    text: Text
    tokens: int
    context: int
    python: Text | None = None


Setting = int | float | str | list[int] | None


@dataclass(frozen=True)
class TunePoint:
    """Settings tried by `make tune` and their figures. pareto: no other point has a better p95 and throughput."""

    settings: Mapping[str, Setting]
    tokens_per_second: float
    p50_ms: float
    p95_ms: float
    pareto: bool
    recommended: bool = False

    @property
    def texts(self) -> dict[str, str]:
        """The settings as text, without those that the config doesn't have."""
        return {
            name: " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
            for name, value in self.settings.items()
            if value is not None
        }


@dataclass(frozen=True)
class Recommendation:
    """The settings that `make tune` recommends."""

    settings: Mapping[str, Setting]


@dataclass(frozen=True)
class Tune:
    """A search by `make tune`. points: by falling throughput. bound: on p95, in seconds."""

    points: Sequence[TunePoint]
    bound: float
    load: Load


@dataclass(frozen=True)
class StepTimes:
    """The duration of a decode step in milliseconds."""

    p50: float


@dataclass(frozen=True)
class Wave:
    """Rows that decoded together on a GPU. steps: the kernels that ran; None for generate()."""

    title: Text
    rows: int
    requests_per_second: float
    tokens_per_second: float
    limit: Limit
    steps: str | None = None
    step_ms: StepTimes | None = None
    step_limit_ms: float | None = None
    vram_mib: float | None = None


@dataclass(frozen=True)
class WayTimes:
    """One way to multiply, µs per product. graph_us: None if it could not be captured. failed: the reason."""

    eager_us: float | None = None
    graph_us: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class ReadTimes:
    """The time to read a matrix at the measured bandwidth, µs."""

    int8: float
    fp16: float


@dataclass(frozen=True)
class Product:
    """A matrix product of a decode step, in each way."""

    outputs: int
    inputs: int
    rows: int
    ways: Mapping[str, WayTimes]
    bandwidth_us: ReadTimes


@dataclass(frozen=True)
class Aim:
    """An aim and its figure. measured_by: the measurement's key. met: None if it was not measured on its device."""

    aim: Text
    bound: float | None = None
    measured: float | None = None
    measured_by: Annotated[str | None, Field(validation_alias="from")] = None
    met: bool | None = None


@dataclass(frozen=True)
class Gpu:
    """What only a GPU run measures. waves, products: by key."""

    prompt_tokens: int
    output_tokens: int
    waves: Mapping[str, Wave]
    products: Mapping[str, Product]
    verdict: Sequence[Aim] | None


@dataclass(frozen=True)
class Machine:
    """The benchmark environment. changed_during_run: the code was not the same until the end."""

    device: Text
    cores: int
    commit: Text
    uncommitted_changes: bool
    python: Text
    versions: Mapping[str, Text]
    changed_during_run: bool | None = None


@dataclass(frozen=True)
class Settings:
    """The settings that every kind of result has. threads: per server."""

    model: Text
    threads: int | None = None


@dataclass(frozen=True)
class Origin:
    """A file's head: environment, time and command behind its figures; stands beneath every table."""

    kind: Text
    date: Text
    machine: Machine
    settings: Settings
    command: Text
    file: str = ""

    @property
    def hardware(self) -> str:
        """The device, with the cores of a CPU."""
        device = self.machine.device
        return f"{device}, {self.machine.cores} cores" if device.startswith("CPU") else device

    @property
    def subject(self) -> str:
        """Device and model, for a plot's subtitle."""
        return f"{self.hardware}; {self.settings.model}"

    def line(self) -> str:
        """Return one line of Markdown."""
        machine, count = self.machine, self.settings.threads
        threads = "" if count is None else f", {count} thread{'s' if count > 1 else ''} per server"
        no_gpu = " (no GPU)" if machine.device.startswith("CPU") else ""
        uncommitted = " with uncommitted changes" if machine.uncommitted_changes else ""
        changed = ", and changed during the run" if machine.changed_during_run else ""
        commit = f"commit `{machine.commit[:7]}`{uncommitted}{changed}"
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        return (
            f"{self.hardware}{no_gpu}{threads}; {self.settings.model}; {self.date.split('T')[0]}; {commit}; "
            f"Python {machine.python}, {versions}. `{self.command}` writes `{self.file}`."
        )


@dataclass(frozen=True)
class Result:
    """A result file. measurements: servers under load, by key. not_run: by key. Sections are None where absent."""

    kind: str
    origin: Origin
    measurements: Mapping[str, Measurement]
    not_run: Mapping[str, NotRun]
    rates: DeviceRates | None = None
    overhead: Account | None = None
    quality: tuple[QualitySettings, Sequence[Quality]] | None = None
    tune: Tune | None = None
    gpu: Gpu | None = None

    def measured(self, *prefix: str) -> list[Measurement]:
        """Return the measurements whose keys begin with these parts, in the file's order."""
        return [one for key, one in self.measurements.items() if _below(key, prefix)]

    def missing(self, *prefix: str) -> list[NotRun]:
        """Return what could not be measured under these keys, without repetitions."""
        return list(dict.fromkeys(one for key, one in self.not_run.items() if _below(key, prefix)))


def read(file: Path) -> Result:
    """Read one result file. Raises ResultError."""
    return parse(_content(file), _shown(file))


def read_all(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the folder's results by kind; files without a kind predate this form and are skipped.

    Raises ResultError for a file that can't be read and for two files of one kind.
    """
    found: dict[str, Result] = {}
    for file in sorted(folder.glob("*.json")):
        content = _content(file)
        if isinstance(content, dict) and "kind" not in content:
            continue
        result = parse(content, _shown(file))
        if result.kind in found:
            raise ResultError(
                f"{found[result.kind].origin.file} and {result.origin.file} are both of kind {result.kind!r}"
            )
        found[result.kind] = result
    return found


@dataclass(frozen=True)
class _Rates:
    device: Text
    threads: int
    bandwidth: Mapping[str, float]
    operations: Mapping[str, float]


@dataclass(frozen=True)
class _GpuSettings:
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class _TuneSettings:
    load: Load


@dataclass(frozen=True)
class _Tune:
    slo_p95_ms: float
    settings: _TuneSettings
    points: Sequence[Mapping[str, object]]
    recommended: Recommendation | None = None


# Cached: building one takes milliseconds.
_ADAPTERS: dict[object, TypeAdapter[Any]] = {}

_SERVERS = ("article", "peers", "sweep")
DECODING = ("graph", "decode", "stock_engine", "stock")
"""First parts of a GPU run's keys, in the order of the table."""


def parse(content: object, file: str) -> Result:
    """Parse a result file's content. file: its name for messages. Raises ResultError."""
    origin = replace(_as(Origin, content, file), file=file)
    assert isinstance(content, Mapping)
    measured = _as(dict[str, dict[str, object]], content.get("measurements", {}), f"{file}: measurements")
    entries = {key: _missing(key, entry, file) or entry for key, entry in measured.items()}
    not_run = {key: entry for key, entry in entries.items() if isinstance(entry, NotRun)}
    ran = {key: entry for key, entry in entries.items() if not isinstance(entry, NotRun)}

    def parsed(kind: type[Parsed], *parts: str) -> dict[str, Parsed]:
        return {
            key: _as(kind, entry, f"{file}: measurements: {key}")
            for key, entry in ran.items()
            if not parts or key.split("/")[0] in parts
        }

    rates = None
    if content.get("rates") is not None:
        found = _as(_Rates, content["rates"], f"{file}: rates")
        bandwidth, operations = dict(found.bandwidth), dict(found.operations)
        rates = DeviceRates.from_json(
            {"device": found.device, "threads": found.threads, "bandwidth": bandwidth, "operations": operations}
        )
    overhead = None if content.get("overhead") is None else _as(Account, content["overhead"], f"{file}: overhead")
    quality = tune = gpu = None
    if origin.kind == "quality":
        quality = _as(QualitySettings, content["settings"], f"{file}: settings"), list(parsed(Quality).values())
    if origin.kind == "tune" and content.get("points") is not None:
        tune = _tuned(_as(_Tune, content, file), file)
    if origin.kind == "gpu":
        settings = _as(_GpuSettings, content["settings"], f"{file}: settings")
        aims = None if content.get("verdict") is None else _as(list[Aim], content["verdict"], f"{file}: verdict")
        gpu = Gpu(
            settings.prompt_tokens, settings.output_tokens, parsed(Wave, *DECODING), parsed(Product, "products"), aims
        )
    return Result(
        kind=origin.kind,
        origin=origin,
        measurements=parsed(Measurement, *_SERVERS),
        not_run=not_run,
        rates=rates,
        overhead=overhead,
        quality=quality,
        tune=tune,
        gpu=gpu,
    )


def _as(kind: type[Parsed], content: object, where: str) -> Parsed:
    try:
        # Only JSON input makes dataclasses of objects in strict mode.
        if kind not in _ADAPTERS:
            _ADAPTERS[kind] = TypeAdapter(kind)
        parsed: Parsed = _ADAPTERS[kind].validate_json(json.dumps(content), strict=True)
        return parsed
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f": {part}" for part in first["loc"])
        shown = repr(first["input"])
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ResultError(f"{where}{place}: {first['msg']}, found {shown}") from None


def _missing(key: str, entry: Mapping[str, object], file: str) -> NotRun | None:
    """Return why there is no measurement here; None if there is one."""
    title = str(entry.get("title") or key)
    if entry.get("not_run") is not None:
        return NotRun(title, _as(str, entry["not_run"], f"{file}: measurements: {key}: not_run"))
    # A load without a single answer has no latencies.
    if key.split("/")[0] in _SERVERS and "latency_ms" not in entry and entry.get("errors"):
        return NotRun(title, f"all {entry['errors']} requests failed")
    return None


def _tuned(found: _Tune, file: str) -> Tune:
    worked = [
        _as(TunePoint, point, f"{file}: points: {number}")
        for number, point in enumerate(found.points)
        if point.get("failure") is None
    ]
    chosen = None if found.recommended is None else found.recommended.settings
    points = [replace(point, recommended=point.settings == chosen) for point in worked]
    points.sort(key=lambda point: -point.tokens_per_second)
    return Tune(points, found.slo_p95_ms / 1e3, found.settings.load)


def _content(file: Path) -> object:
    try:
        content: object = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ResultError(f"{_shown(file)} is not JSON: {error}") from error
    return content


def _shown(file: Path) -> str:
    """Return the path inside the repository, or the name alone: documents contain no folders of a machine."""
    resolved = file.resolve()
    return resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else file.name


def _below(key: str, prefix: tuple[str, ...]) -> bool:
    return tuple(key.split("/")[: len(prefix)]) == prefix
