"""What llama_unary costs a unary request: `python -m perf.unary [--users 32 64] [--rounds 5]`.

The same load over /generate on two servers of one checkpoint: the default config, which answers itself, and the
streaming config with llama_unary in front, where a request goes between processes once more. Both run all the time, and
the idle one does nothing; rounds alternate between them, so that a slower minute of the machine affects both. `ratio`
is llama_unary's throughput over the default's, and `processor_ratio` that of the processor seconds per token of
tritonserver and its models: medians over the rounds. The config streaming, which has llama_unary beside, can be
the default of `make serve` if the ratio of throughputs is at least 0.97.

Bound: a slot is empty from a request's last token until the next one's prefill. Here that way is longer by two round
trips to Triton's process, about a millisecond, and where users are as many as slots by the batcher's delay of 10 ms: of
200 steps of 8 ms, 0.7 %.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from triton_local.server import LocalTriton

from perf import workload
from perf.checkpoint import default_checkpoint
from perf.command import CORES, count, given
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.load.protocols import Request, Target
from perf.load.summary import summarize
from perf.overhead.processes import ServerProcesses
from perf.results_file import Results
from perf.servers.triton import local_triton

TIMEOUT_S = 900.0
WAVES = 3
"""Requests of a user in a round, after a first one."""
MODELS = {"default": "llama", "unary": "llama_unary"}
"""The two ways, and the model that is asked."""


def measure(way: str, server: LocalTriton, requests: list[Request], users: int) -> dict[str, Any]:
    """Load a server with a number of users; return tokens per second, latencies and processor time per token."""
    processes = ServerProcesses.of(server.pid)
    before = sum(processes.seconds().values())
    target = Target(way, "triton_generate", f"http://{server.http_url}", MODELS[way])
    run = drive(target, requests, Closed(users), users, TIMEOUT_S)
    seconds = sum(processes.seconds().values()) - before
    summary = summarize(run, None)
    if summary["errors"]:
        raise RuntimeError(f"{way}: {summary['errors']} requests failed: {summary['error_messages']}")
    found = {key: summary[key] for key in ("tokens_per_second", "latency_ms")}
    return {**found, "processor_ms_per_token": 1e3 * seconds / sum(request.output_tokens for request in requests)}


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(prog="python -m perf.unary", description=__doc__)
    parser.add_argument("--users", type=count, nargs="+", default=[32, 64], help="at a time (32 64)")
    parser.add_argument("--rounds", type=count, default=5, help="of each way for each number of users (5)")
    parser.add_argument("--output", type=Path, default=Path("perf/results/unary.json"))
    options = parser.parse_args()
    checkpoint = default_checkpoint()
    settings = {"model": checkpoint.name, "threads": CORES, "rounds": options.rounds}
    results = Results(options.output, "unary", settings, resume=False)
    command = ["python", "-m", "perf.unary", *given(parser, options, ["users", "rounds"])]
    results.section("command", shlex.join(command))
    environment = {"OMP_NUM_THREADS": str(CORES)}
    rounds: dict[int, list[dict[str, dict[str, Any]]]] = {users: [] for users in options.users}
    with (
        local_triton(variant="default", model=str(checkpoint), environment=environment) as default,
        local_triton(variant="streaming", model=str(checkpoint), environment=environment) as unary,
    ):
        servers = {"default": default, "unary": unary}
        for number in range(options.rounds):
            order = list(servers) if number % 2 == 0 else list(reversed(servers))
            for users, found in rounds.items():
                requests = workload.warm_and_measured(checkpoint, "equal", users, WAVES * users)
                found.append({way: measure(way, servers[way], requests, users) for way in order})
                print(users, json.dumps(found[-1]), file=sys.stderr)
    for users, found in rounds.items():
        ratios = {"ratio": "tokens_per_second", "processor_ratio": "processor_ms_per_token"}
        medians = {
            name: round(statistics.median(one["unary"][what] / one["default"][what] for one in found), 4)
            for name, what in ratios.items()
        }
        results.add(f"{users} users", {**medians, "rounds": found})
        print(f"{users} users: {medians}")
    results.finish()
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
