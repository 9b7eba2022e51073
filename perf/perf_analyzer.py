"""One run of NVIDIA's perf_analyzer: a closed loop against a Triton, as records of each request.

`make bench` fetches the binary from a wheel of `tritonclient` that is as old as the server of nvidia-pytriton and runs
wherever that does; later ones need a newer glibc. The two libraries that few machines have are in nvidia-pytriton's
wheel under hashed names; a folder of links gives them the names that the binary asks for.

Asynchronous calls from one thread share one queue, and with --request-count each request of the list is sent exactly
once. The warm-up's are sent like all others and left out of the latencies: perf_analyzer's own --warmup-request-count
waits until they are all answered. Times are the profile export's, because its report counts the warm-up.

perf_analyzer stops at the first failed request and writes no export then. That, a second empty export, and answers
other than asked for are an AnalyzerError and never a measurement.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triton_llama.sampling_params import SamplingParams
from triton_llama.tensors import prepare
from triton_local.runtime import Interpreter, find_wheel

from perf.environment import ROOT
from perf.load.protocols import Request
from perf.load.records import Record, Run

BINARY = ROOT / ".work" / "perf_analyzer" / "bin" / "perf_analyzer"
LIBRARIES = ("libb64.so.0d", "libcudart.so.12")
# A usage text of hundreds of lines may follow.
_REASON_LINES = 4


class AnalyzerError(Exception):
    """A run of perf_analyzer is no measurement; `str()` is the message for the user."""


def measure(server: str, requests: Sequence[Request], concurrency: int, warmup: int, timeout: float) -> tuple[Run, str]:
    """Send these requests over gRPC to `server` (host:port), `concurrency` at a time.

    Returns the run, in the order of sending and with times in seconds since 1970, and the command, without its folder.
    warmup: at least `concurrency`, so that the measured ones meet a full server; or 0. timeout: seconds for all of
    them. Raises AnalyzerError, or a LauncherError without the wheel.
    """
    arguments = [
        *("-m", "llama", "-i", "grpc", "-u", server, "--input-data", "requests.json"),
        *("--async", "--max-threads", "1", "--concurrency-range", str(concurrency)),
        *("--request-count", str(len(requests))),
        *("--profile-export-file", "profile.json"),
    ]
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as name:
        folder = Path(name)
        (folder / "requests.json").write_text(inputs(requests))
        _link_libraries(folder)
        export = folder / "profile.json"
        _run(arguments, folder, timeout)
        if not export.read_bytes():
            # Rarely, and with exit code 0. It refuses a file that exists.
            export.unlink()
            _run(arguments, folder, timeout)
        try:
            profile = json.loads(export.read_text())
        except ValueError as error:
            raise AnalyzerError(f"perf_analyzer's profile export is no JSON: {error}") from error
        return Run(concurrency, read_profile(profile, requests), warmup), shlex.join([BINARY.name, *arguments])


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
        entries.append(
            {tensor.name: {"content": list(tensor.values), "shape": [len(tensor.values)]} for tensor in tensors}
        )
    return json.dumps({"data": entries})


def read_profile(profile: Any, requests: Sequence[Request]) -> tuple[Record, ...]:  # noqa: ANN401 - JSON
    """Return the records of a profile export, in the order of sending.

    Raises AnalyzerError unless exactly these requests were sent, each answered with as many tokens as it asked for.
    """
    (experiment,) = profile["experiments"]
    answered = [_answered(request) for request in experiment["requests"]]
    planned, sent = Counter(requests), Counter(request for _, request in answered)
    if planned != sent:
        raise AnalyzerError(
            f"perf_analyzer was to send {planned.total()} requests and sent {sent.total()}: "
            f"{(planned - sent).total()} are missing, {(sent - planned).total()} are others"
        )
    for record, request in answered:
        if record.output_tokens != request.output_tokens:
            raise AnalyzerError(
                f"an answer has another length than requested: {record.output_tokens} tokens, not "
                f"{request.output_tokens}"
            )
    return tuple(sorted((record for record, _ in answered), key=lambda record: record.scheduled))


def _link_libraries(folder: Path) -> None:
    """Give the wheel's libraries the names that the binary asks for. Raises AnalyzerError where the wheel lacks one."""
    source = find_wheel(Interpreter.current().site_packages).libraries
    for name in LIBRARIES:
        # libb64-98cb6333.so.0d for libb64.so.0d: a repaired wheel's name has a hash after the first part.
        stem, ending = name.split(".so", 1)
        files = list(source.glob(f"{stem}-*.so{ending}*"))
        if len(files) != 1:
            raise AnalyzerError(f"perf_analyzer needs {name}; {source} has {len(files)} of it, not one")
        (folder / name).symlink_to(files[0])


def _run(arguments: Sequence[str], folder: Path, timeout: float) -> None:
    """Run perf_analyzer in a folder that has its libraries."""
    # An empty entry would mean the working directory.
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    try:
        ran = subprocess.run(
            [BINARY, *arguments],
            cwd=folder,
            env={**os.environ, "LD_LIBRARY_PATH": paths},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise AnalyzerError("perf_analyzer is missing: make bench fetches it") from error
    except subprocess.TimeoutExpired as error:
        raise AnalyzerError(f"perf_analyzer was still running after {timeout:g} s") from error
    # It also ends with code 0 without a stable measurement, and then writes no export.
    if ran.returncode != 0 or not (folder / "profile.json").exists():
        lines = [line.strip() for line in (ran.stderr.strip() or ran.stdout.strip()).splitlines() if line.strip()]
        reason = " ".join(lines[:_REASON_LINES]) or "no output"
        raise AnalyzerError(f"perf_analyzer ended with code {ran.returncode}: {reason}")


def _answered(request: dict[str, Any]) -> tuple[Record, Request]:
    if request.get("success", True) is not True:
        raise AnalyzerError(f"a request failed: {request.get('response_outputs')}")
    # One response a request: the servers measured here are not decoupled.
    (ended,), (outputs,) = request["response_timestamps"], request["response_outputs"]
    inputs, sent = request["request_inputs"], request["timestamp"] / 1e9
    prompt_tokens, output_tokens = int(outputs["num_input_tokens"]), int(outputs["num_output_tokens"])
    record = Record(sent, sent, ended / 1e9, (), prompt_tokens, output_tokens, "")
    return record, Request(inputs["text_input"], int(inputs["max_tokens"]))
