"""Result files (perf/results/*.json), parsed strictly into frozen dataclasses.

Fields have the JSON keys' names. Other programs, older versions of them and people with an editor write these files: a
field that is missing or of another type raises ResultError, which names the file, the place and the value. The head is
parsed when the file is read, a measurement or a section when a table or a plot asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AliasPath, Field, TypeAdapter, ValidationError

from perf.load.summary import SLO

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "perf" / "results"

Text = Annotated[str, Field(min_length=1)]
Setting = int | float | str | list[int] | None
Parsed = TypeVar("Parsed")


class ResultError(ValueError):
    """A result file that can't be read. The message names the file, the field and the value found."""


def _at(*path: str) -> Any:  # noqa: ANN401 - what pydantic's Field returns
    """Return the annotation of a field that the JSON has at this path."""
    return Field(validation_alias=AliasPath(*path))


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
class Goodput:
    """Requests answered within the objective: per second, and as a share of all."""

    slo: SLO
    requests_per_second: float
    share: float


@dataclass(frozen=True)
class Measurement:
    """One server under one load. None: not applicable or not measured. requests: includes the errors.

    model: where it isn't the file's. decode_steps: how our server computes them, in its own words.
    """

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
    model: str | None = None
    decode_steps: Annotated[str | None, _at("settings", "decode_steps")] = None

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
class AccountRun:
    """One way to process the account's load."""

    tokens_per_second: float


@dataclass(frozen=True)
class FullSteps:
    """Decode steps of all rows in the bare engine. passes_ms: the model's part. limit_ms: bytes over bandwidth."""

    rows: int
    step_ms: float
    passes_ms: float
    rest_share: float
    limit_ms: float
    share_of_limit: float


@dataclass(frozen=True)
class Account:
    """An overhead account and its load. parts: each after its parent, larger ones first."""

    requests: Annotated[int, _at("settings", "requests")]
    mix: Annotated[Text, _at("settings", "mix")]
    slots: Annotated[int, _at("settings", "slots")]
    quantization: Annotated[Text, _at("settings", "quantization")]
    runs: Mapping[str, AccountRun]
    parts: Sequence[Part]
    steps: FullSteps | None = None

    @property
    def load(self) -> str:
        """The load in words."""
        rows = f"{self.slots} rows at a time, quantization {self.quantization}"
        return f"{self.requests} requests of {self.mix} lengths, {rows}"


@dataclass(frozen=True)
class LossDifference:
    """The loss minus the first row's, nats per token."""

    mean: float
    standard_error: float


@dataclass(frozen=True)
class Divergence:
    """KL divergence, nats per token."""

    mean: float
    p99: float


@dataclass(frozen=True)
class Quality:
    """One form of INT8. None for the unquantized reference, and for what was not compared with INT8's weights alone."""

    title: Text
    weights_mib: float
    perplexity: float
    loss_difference: LossDifference | None = None
    kl_nats: Divergence | None = None
    kl_from_weights_only_nats: Divergence | None = None
    top1_agreement: float | None = None


@dataclass(frozen=True)
class QualitySettings:
    """The text that the quality was measured on."""

    text: Text
    tokens: int
    context: int
    python: Text | None = None


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
class WaveSettings:
    """The lengths of a wave's rows, in tokens."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class WayTimes:
    """One way to multiply, µs per product. graph_us: None if it could not be captured. failed: the reason."""

    eager_us: float | None = None
    graph_us: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Product:
    """A matrix product of a decode step, in each way. *_bandwidth_us: to read the matrix at the measured bandwidth."""

    outputs: int
    inputs: int
    rows: int
    ways: Mapping[str, WayTimes]
    int8_bandwidth_us: Annotated[float, _at("bandwidth_us", "int8")]
    fp16_bandwidth_us: Annotated[float, _at("bandwidth_us", "fp16")]


@dataclass(frozen=True)
class Aim:
    """An aim and its figure. measured_by: the measurement's key. met: None if it was not measured on its device."""

    aim: Text
    bound: float | None = None
    measured: float | None = None
    measured_by: Annotated[str | None, Field(validation_alias="from")] = None
    met: bool | None = None


@dataclass(frozen=True)
class Origin:
    """A file's head: environment, time and command behind its figures; stands beneath every table.

    threads: per server. changed_during_run: the code was not the same until the end.
    """

    kind: Text
    date: Text
    command: Text
    device: Annotated[Text, _at("machine", "device")]
    cores: Annotated[int, _at("machine", "cores")]
    commit: Annotated[Text, _at("machine", "commit")]
    uncommitted_changes: Annotated[bool, _at("machine", "uncommitted_changes")]
    python: Annotated[Text, _at("machine", "python")]
    versions: Annotated[Mapping[str, Text], _at("machine", "versions")]
    model: Annotated[Text, _at("settings", "model")]
    changed_during_run: Annotated[bool | None, _at("machine", "changed_during_run")] = None
    threads: Annotated[int | None, _at("settings", "threads")] = None
    file: str = ""

    @property
    def hardware(self) -> str:
        """The device, with the cores of a CPU."""
        return f"{self.device}, {self.cores} cores" if self.device.startswith("CPU") else self.device

    @property
    def subject(self) -> str:
        """Device and model, for a plot's subtitle."""
        return f"{self.hardware}; {self.model}"

    def line(self) -> str:
        """Return one line of Markdown."""
        no_gpu = " (no GPU)" if self.device.startswith("CPU") else ""
        count = self.threads
        threads = "" if count is None else f", {count} thread{'s' if count > 1 else ''} per server"
        uncommitted = " with uncommitted changes" if self.uncommitted_changes else ""
        changed = ", and changed during the run" if self.changed_during_run else ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.hardware}{no_gpu}{threads}; {self.model}; {self.date.split('T')[0]}; "
            f"commit `{self.commit[:7]}`{uncommitted}{changed}; "
            f"Python {self.python}, {versions}. `{self.command}` writes `{self.file}`."
        )


@dataclass(frozen=True)
class Result:
    """A result file: its head, and the rest as it stands in the file. Every method raises ResultError."""

    origin: Origin
    content: Mapping[str, Any]

    def measured(self, *prefix: str) -> list[Measurement]:
        """Return the servers under load whose keys begin with these parts, in the file's order."""
        return self.rows(Measurement, *prefix)

    def rows(self, kind: type[Parsed], *prefix: str) -> list[Parsed]:
        """Return the measurements of a kind whose keys begin with these parts, in the file's order."""
        return [
            _as(kind, entry, f"{self.origin.file}: measurements: {key}")
            for key, entry in self._entries(prefix)
            if self._reason(key, entry) is None
        ]

    def missing(self, *prefix: str) -> list[str]:
        """Return what could not be measured under these keys, by its title or else its key, and why."""
        reasons = [(key, entry, self._reason(key, entry)) for key, entry in self._entries(prefix)]
        return [f"{entry.get('title') or key} ({why})" for key, entry, why in reasons if why is not None]

    def section(self, name: str, kind: type[Parsed]) -> Parsed | None:
        """Return a section beside the measurements; None if the file doesn't have it."""
        found = self.content.get(name)
        return None if found is None else _as(kind, found, f"{self.origin.file}: {name}")

    def _entries(self, prefix: tuple[str, ...]) -> Iterator[tuple[str, dict[str, object]]]:
        where = f"{self.origin.file}: measurements"
        entries = _as(dict[str, dict[str, object]], self.content.get("measurements", {}), where)
        return ((key, entry) for key, entry in entries.items() if tuple(key.split("/")[: len(prefix)]) == prefix)

    def _reason(self, key: str, entry: Mapping[str, object]) -> str | None:
        """Return why there is no measurement here; None if there is one."""
        if entry.get("not_run") is not None:
            return _as(str, entry["not_run"], f"{self.origin.file}: measurements: {key}: not_run")
        # A load without a single answer has no latencies.
        if entry.get("errors") and "load" in entry and "latency_ms" not in entry:
            return f"all {entry['errors']} requests failed"
        return None


def tuned(result: Result) -> Tune | None:
    """Return the search of a result of `make tune`, without the points that failed; None if it has no points."""
    file = result.origin.file
    found = result.section("points", list[dict[str, object]])
    if found is None:
        return None
    worked = [
        _as(TunePoint, point, f"{file}: points: {number}")
        for number, point in enumerate(found)
        if point.get("failure") is None
    ]
    chosen = result.section("recommended", Recommendation)
    points = [replace(point, recommended=chosen is not None and point.settings == chosen.settings) for point in worked]
    bound = _as(float, result.content.get("slo_p95_ms"), f"{file}: slo_p95_ms") / 1e3
    load = _as(Load, result.content["settings"].get("load"), f"{file}: settings: load")
    return Tune(sorted(points, key=lambda point: -point.tokens_per_second), bound, load)


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
        origin = (result := parse(content, _shown(file))).origin
        if origin.kind in found:
            raise ResultError(f"{found[origin.kind].origin.file} and {origin.file} are both of kind {origin.kind!r}")
        found[origin.kind] = result
    return found


def parse(content: object, file: str) -> Result:
    """Parse a result file's head. file: its name for messages. Raises ResultError."""
    origin = replace(_as(Origin, content, file), file=file)
    assert isinstance(content, Mapping)
    return Result(origin, content)


# Kept: building one takes milliseconds.
_ADAPTERS: dict[object, TypeAdapter[Any]] = {}


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
