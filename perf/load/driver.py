"""`drive`: put a server under load from a process of its own and return what happened to the requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perf.load.arrivals import Closed, Poisson
from perf.load.protocols import Request, Target
from perf.load.records import Record, Run

_ROOT = Path(__file__).resolve().parents[2]
# For the process to start, and to parse answers and write records.
_SLACK_S = 60.0


class LoadError(Exception):
    """The generator itself failed, which says nothing about the server."""


@dataclass(frozen=True)
class Plan:
    """What the generator's process runs. timeout: seconds for all of the requests together."""

    target: Target
    requests: Sequence[Request]
    arrivals: Closed | Poisson
    timeout: float

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps({**asdict(self), "arrivals": {type(self.arrivals).__name__: asdict(self.arrivals)}})

    @classmethod
    def from_json(cls, line: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        fields = json.loads(line)
        ((kind, arrivals),) = fields["arrivals"].items()
        return cls(
            target=Target(**fields["target"]),
            requests=[Request(**request) for request in fields["requests"]],
            arrivals={"Closed": Closed, "Poisson": Poisson}[kind](**arrivals),
            timeout=fields["timeout"],
        )


def drive(target: Target, requests: Sequence[Request], arrivals: Closed | Poisson, warmup: int, timeout: float) -> Run:
    """Send the requests in one sequence; the first `warmup` are recorded but not measured.

    For a closed loop's throughput the warm-up should be at least its concurrency (`load.records` explains why).
    `timeout`: seconds for all requests together, warm-up included. Requests not answered by then, or never sent, are
    recorded as errors, as is everything else that fails. Raises LoadError if the generator fails.
    """
    if not 0 <= warmup < len(requests):
        raise ValueError(f"warmup is {warmup}, must be 0 … {len(requests) - 1}: fewer than the requests")
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "perf.load"],
            input=Plan(target, requests, arrivals, timeout).to_json(),
            capture_output=True,
            text=True,
            timeout=timeout + _SLACK_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"the load generator was still running {_SLACK_S:g} s after its {timeout:g} s") from error
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines() or ["nothing on stderr"]
        raise LoadError(f"the load generator ended with code {finished.returncode}: {lines[-1]}")
    return Run(arrivals, tuple(Record.from_json(fields) for fields in json.loads(finished.stdout)), warmup)
