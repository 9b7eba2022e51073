"""One run of perf_analyzer: a closed loop against a Triton, as records of each request.

Asynchronous calls from one thread: the requests share one queue, and each answer makes way for the next one in the
given order. (With several threads, each has its own share of the list, and ends alone.) With --request-count each
request of the list is sent exactly once. The warm-up's are sent like all others and left out of the latencies:
perf_analyzer's own --warmup-request-count waits until they are all answered, so that the measured ones would begin on
an idle server. Its own report has percentiles of all requests, warm-up included, and a throughput over a window that
ends up to a second after the last answer; the profile export has the raw times.

perf_analyzer stops at the first failed request and writes no export then. That, a run that it does not call stable, and
answers other than asked for are a FailedRunError and never a measurement: a report has no errors.
"""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_llama.sampling_params import SamplingParams
from triton_llama.tensors import prepare

from perf.analyzer.binary import NAME, AnalyzerError, PerfAnalyzer, find
from perf.load.arrivals import Closed
from perf.load.protocols import Request
from perf.load.records import Record, Run

_SERVER_COLUMNS = {
    "queue": "Server Queue",
    "compute_input": "Server Compute Input",
    "compute_infer": "Server Compute Infer",
    "compute_output": "Server Compute Output",
}
# A usage text of hundreds of lines may follow.
_REASON_LINES = 4


class FailedRunError(AnalyzerError):
    """A run that is no measurement: it failed, a request failed, or other requests were sent."""


@dataclass(frozen=True)
class AnalyzerReport:
    """run: in the order of sending, times in seconds since 1970. command: as run, but for the folder.

    server_us: Triton's mean microseconds per request in its queue and in the model, as perf_analyzer reports them: of
    all requests, warm-up included.
    """

    version: str
    command: str
    run: Run
    server_us: Mapping[str, float]


def measure(
    url: str, requests: Sequence[Request], concurrency: int, warmup: int, timeout: float, model: str = "llama"
) -> AnalyzerReport:
    """Send these requests over gRPC to `url` (host:port), `concurrency` at a time.

    warmup: at least `concurrency`, so that the measured ones meet a full server; or 0. timeout: seconds for all of
    them. Raises ValueError for inconsistent counts, FailedRunError, and what `find` raises.
    """
    if not 1 <= concurrency <= len(requests) or not (warmup == 0 or concurrency <= warmup < len(requests)):
        raise ValueError(
            f"concurrency is {concurrency}, warmup {warmup}, and there are {len(requests)} requests; it must be "
            "1 <= concurrency <= warmup < requests, or warmup 0 and 1 <= concurrency <= requests"
        )
    arguments = [
        *("-m", model, "-i", "grpc", "-u", url, "--input-data", "requests.json"),
        *("--async", "--max-threads", "1", "--concurrency-range", str(concurrency)),
        *("--request-count", str(len(requests))),
        *("--profile-export-file", "profile.json", "-f", "report.csv"),
    ]
    analyzer = find()
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as name:
        folder = Path(name)
        (folder / "requests.json").write_text(inputs(requests))
        _run(analyzer, arguments, folder, timeout)
        records = read_profile(folder / "profile.json", requests)
        with (folder / "report.csv").open(newline="") as file:
            (row,) = csv.DictReader(file)
    return AnalyzerReport(
        version=analyzer.version,
        command=shlex.join([NAME, *arguments]),
        run=Run(Closed(concurrency), records, warmup),
        server_us={stage: float(row[column]) for stage, column in _SERVER_COLUMNS.items()},
    )


def inputs(requests: Sequence[Request]) -> str:
    """Return the requests as --input-data: every input of the contract in every request.

    Triton batches only requests with the same set of inputs, so the client's own full set is sent. perf_analyzer adds
    none by itself (it would send random numbers as `max_tokens`), but the batch dimension.
    """
    entries: list[dict[str, object]] = []
    for request in requests:
        tokens = request.output_tokens
        # min_tokens: no end token or stop string before. seed: greedy, but a random one would change the file.
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0, seed=0)
        tensors = prepare(request.prompt, params).tensors
        entries.append({one.name: {"content": list(one.values), "shape": [len(one.values)]} for one in tensors})
    return json.dumps({"data": entries})


def read_profile(path: Path, requests: Sequence[Request]) -> tuple[Record, ...]:
    """Return the records of a profile export, in the order of sending.

    Raises FailedRunError unless exactly these requests were sent, each answered with as many tokens as it asked for.
    """
    try:
        (experiment,) = json.loads(path.read_text())["experiments"]
        answered = sorted((_answered(request) for request in experiment["requests"]), key=lambda one: one[0].scheduled)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise FailedRunError(f"perf_analyzer's profile export {path.name} can't be read: {error!r}") from error
    asked, sent = Counter(requests), Counter(request for _, request in answered)
    if asked != sent:
        raise FailedRunError(
            f"perf_analyzer was to send {asked.total()} requests and sent {sent.total()}: {(asked - sent).total()} are "
            f"missing, {(sent - asked).total()} are others or more than asked for"
        )
    for record, request in answered:
        if record.output_tokens != request.output_tokens:
            raise FailedRunError(
                f"an answer has another length than was asked for: {record.output_tokens} tokens instead of "
                f"{request.output_tokens}"
            )
    return tuple(record for record, _ in answered)


def _run(analyzer: PerfAnalyzer, arguments: Sequence[str], folder: Path, timeout: float) -> None:
    try:
        with analyzer.environment() as environment:
            ran = subprocess.run(
                [str(analyzer.executable), *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise FailedRunError(f"perf_analyzer was still running after {timeout:g} s") from error
    # It also ends with code 0 without a stable measurement, and then writes no export.
    if ran.returncode != 0 or not (folder / "profile.json").exists():
        lines = [line.strip() for line in (ran.stderr.strip() or ran.stdout.strip()).splitlines() if line.strip()]
        reason = " ".join(lines[:_REASON_LINES]) or "no output"
        raise FailedRunError(f"perf_analyzer ended with code {ran.returncode}: {reason}")


def _answered(request: dict[str, Any]) -> tuple[Record, Request]:
    if request.get("success", True) is not True:
        raise FailedRunError(f"a request failed: {request.get('response_outputs')}")
    # One response a request: the servers measured here are not decoupled.
    (ended,), (outputs,) = request["response_timestamps"], request["response_outputs"]
    inputs, sent = request["request_inputs"], request["timestamp"] / 1e9
    prompt_tokens, output_tokens = int(outputs["num_input_tokens"]), int(outputs["num_output_tokens"])
    record = Record(sent, sent, ended / 1e9, (), prompt_tokens, output_tokens, "")
    return record, Request(inputs["text_input"], int(inputs["max_tokens"]))
