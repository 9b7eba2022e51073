"""`drive`: put a server under load and return what happened to the requests.

Starts the generator's process and waits for it. The only module of this package that a benchmark needs to call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.load.arrivals import Closed, Poisson
from perf.load.plan import Asked, Plan
from perf.load.records import Record
from perf.load.run import Run
from perf.load.target import Target
from perf.setting.workload import Request

_ROOT = Path(__file__).resolve().parents[2]
# For the process to start, and to write its records.
_SLACK_S = 60.0


class LoadError(Exception):
    """The generator itself failed, which says nothing about the server."""


def drive(target: Target, requests: Sequence[Request], arrivals: Closed | Poisson, warmup: int, timeout: float) -> Run:
    """Send the requests, all in one row; the first `warmup` are in the run, and not among its measured ones.

    For a closed loop's throughput the warm-up should be at least its concurrency (`load.throughput` says why).
    `timeout`: seconds for all requests together, warm-up included. What isn't answered by then, or was never sent, is
    recorded as an error, like everything else that goes wrong. Raises LoadError if the generator fails.
    """
    if not 0 <= warmup < len(requests):
        raise ValueError(f"warmup is {warmup}, must be 0 … {len(requests) - 1}: fewer than the requests")
    asked = [Asked(request.prompt, request.output_tokens) for request in requests]
    plan = Plan(target, asked, arrivals, timeout)
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "perf.load"],
            input=plan.to_json(),
            capture_output=True,
            text=True,
            timeout=timeout + _SLACK_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"the load generator was still at work {_SLACK_S:g} s after its {timeout:g} s") from error
    if finished.returncode != 0:
        said = finished.stderr.strip().splitlines() or ["nothing on stderr"]
        raise LoadError(f"the load generator ended with code {finished.returncode}: {said[-1]}")
    return Run(arrivals, tuple(Record.from_json(fields) for fields in json.loads(finished.stdout)), warmup)
