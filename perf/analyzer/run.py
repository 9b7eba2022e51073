"""One run of perf_analyzer: a closed loop against a Triton, and what happened to each request.

Asynchronous calls from one thread: its requests share one queue, and whichever is answered makes way for the next one
in the given order. (With a thread for each, every thread has its own share of the list, and ends alone.) With
--request-count each request of the list is sent exactly once. The first `warmup` of them are sent like all others and
left out of the latencies: perf_analyzer's own --warmup-request-count waits until they are all answered, so that the
measured ones would begin on an idle server again.

perf_analyzer gives up at the first request that fails and writes no export then. That, a run that it doesn't call
stable, and answers that aren't what was asked for are a FailedRunError and never a measurement: a report has no errors.
"""

from __future__ import annotations

import csv
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.analyzer import inputs, profile
from perf.analyzer.binary import NAME, PerfAnalyzer, find
from perf.analyzer.errors import FailedRunError
from perf.analyzer.profile import Answered
from perf.load.protocols import Request
from perf.load.records import Window, steady_state

_SERVER_COLUMNS = {
    "queue": "Server Queue",
    "compute_input": "Server Compute Input",
    "compute_infer": "Server Compute Infer",
    "compute_output": "Server Compute Output",
}
# A usage text of hundreds of lines may follow.
_REASON_LINES = 4


@dataclass(frozen=True)
class AnalyzerReport:
    """What was sent and answered, in the order of sending; the first `warmup` are the warm-up.

    command: as it was run, but for the folder. server_us: Triton's mean microseconds a request in its queue and in the
    model, as perf_analyzer reports them: of all requests, warm-up included.
    """

    version: str
    command: str
    answered: tuple[Answered, ...]
    warmup: int
    server_us: Mapping[str, float]

    @property
    def measured(self) -> tuple[Answered, ...]:
        """The requests after the warm-up."""
        return self.answered[self.warmup :]

    @property
    def latencies_s(self) -> list[float]:
        """Seconds from sending to the answer, of the measured requests."""
        return [one.latency for one in self.measured]

    @property
    def window(self) -> Window:
        """The time in which the load was what it is said to be, in seconds since 1970."""
        return steady_state([one.sent for one in self.answered], [one.answered for one in self.answered], self.warmup)

    @property
    def warm(self) -> float:
        """When as many answers had come as the warm-up has requests, in seconds since 1970."""
        return sorted(one.answered for one in self.answered)[self.warmup - 1] if self.warmup else self.answered[0].sent

    @property
    def whole(self) -> Window:
        """From the first request's sending to the last answer, warm-up included."""
        return Window(self.answered[0].sent, max(one.answered for one in self.answered))


def measure(
    url: str,
    requests: Sequence[Request],
    concurrency: int,
    warmup: int,
    timeout: float,
    model: str = "llama",
    analyzer: PerfAnalyzer | None = None,
) -> AnalyzerReport:
    """Send these requests over gRPC to `url` (host:port), so many at a time, and return what happened.

    warmup: at least `concurrency`, so that the measured ones meet a full server; or 0. timeout: seconds for all of
    them. analyzer: None finds one. Raises ValueError for counts that don't fit together, FailedRunError, and what
    `find` raises.
    """
    if not 1 <= concurrency <= len(requests) or not (warmup == 0 or concurrency <= warmup < len(requests)):
        raise ValueError(
            f"concurrency is {concurrency}, warmup {warmup}, and there are {len(requests)} requests; it must be "
            "1 <= concurrency <= warmup < requests, or warmup 0 and 1 <= concurrency <= requests"
        )
    analyzer = analyzer or find()
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as name:
        folder = Path(name)
        (folder / "requests.json").write_text(inputs.document(requests))
        arguments = [
            *("-m", model, "-i", "grpc", "-u", url, "--input-data", "requests.json"),
            *("--async", "--max-threads", "1", "--concurrency-range", str(concurrency)),
            *("--request-count", str(len(requests))),
            *("--profile-export-file", "profile.json", "-f", "report.csv"),
        ]
        _run(analyzer, arguments, folder, timeout)
        answered = profile.read(folder / "profile.json")
        profile.check(answered, requests)
        return AnalyzerReport(
            version=analyzer.version,
            command=shlex.join([NAME, *arguments]),
            answered=answered,
            warmup=warmup,
            server_us=_server_side(folder / "report.csv"),
        )


def _run(analyzer: PerfAnalyzer, arguments: Sequence[str], folder: Path, timeout: float) -> None:
    try:
        ran = subprocess.run(
            [str(analyzer.executable), *arguments],
            cwd=folder,
            env=analyzer.environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FailedRunError(f"perf_analyzer was still at work after {timeout:g} s") from error
    # It also ends with code 0 where it hasn't got what it calls a stable measurement, and then writes no export.
    if ran.returncode != 0 or not (folder / "profile.json").exists():
        said = [line.strip() for line in (ran.stderr.strip() or ran.stdout.strip()).splitlines() if line.strip()]
        reason = " ".join(said[:_REASON_LINES]) or "it said nothing"
        raise FailedRunError(f"perf_analyzer ended with code {ran.returncode}: {reason}")


def _server_side(path: Path) -> dict[str, float]:
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    return {name: float(row[column]) for name, column in _SERVER_COLUMNS.items()}
