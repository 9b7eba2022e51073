"""In-flight batching against batches, and the prefill bound: `make bench-inflight`.

The first is measured through a real server, at three mixes of lengths: tokens per second of `scheduling: batch` and
`inflight`. Both run the default config, so the same weights, slots and queue; only the setting differs. Every request
generates exactly its length, the lengths of a mix have the same mean, and both schedulers get the same requests in the
same order at the same concurrency. With batches a slot stays empty from the end of its row to the end of the batch's
longest one, so the share that is lost is 1 - mean / (expected maximum of a batch).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from perf import environment
from perf.inflight.steps import prefill_bounds
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.load.protocols import Request, Target
from perf.load.records import Run
from perf.servers.triton import local_triton

PROMPT = "Return a list of"
MEAN = 64
LONGEST = 400
TIMEOUT_S = 600.0


def lengths(mix: str, count: int) -> list[int]:
    """Return `count` lengths of mean about 64 tokens: equal, uniform (8 … 120) or geometric (1 … 400)."""
    randomness = random.Random(mix)
    if mix == "equal":
        return [MEAN] * count
    if mix == "uniform":
        return [randomness.randint(8, 2 * MEAN - 8) for _ in range(count)]
    return [min(int(randomness.expovariate(1 / MEAN)) + 1, LONGEST) for _ in range(count)]


def schedulers(count: int, concurrency: int, repetitions: int) -> list[dict[str, object]]:
    """Measure both schedulers at all mixes; they alternate, so that a slow minute affects both."""
    mixes = {mix: lengths(mix, count) for mix in ("equal", "uniform", "geometric")}
    runs: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    for _ in range(repetitions):
        for scheduling in ("batch", "inflight"):
            with local_triton(
                variant="default", environment={"OMP_NUM_THREADS": "1", "LLAMA_SCHEDULING": scheduling}
            ) as server:
                target = Target(scheduling, "triton_generate", f"http://{server.http_url}", "llama")
                _load(target, mixes["equal"][:concurrency], concurrency)
                for mix, wanted in mixes.items():
                    runs[mix, scheduling].append(_load(target, wanted, concurrency))
    rows: list[dict[str, object]] = []
    for (mix, scheduling), measured in runs.items():
        seconds = [run.whole.seconds for run in measured]
        latencies = [record.latency for run in measured for record in run.records]
        rows.append(
            {
                "mix": mix,
                "scheduling": scheduling,
                "requests": count,
                "concurrency": concurrency,
                "tokens": sum(mixes[mix]),
                "longest": max(mixes[mix]),
                "seconds": [round(value, 3) for value in seconds],
                "tokens_per_second": round(sum(mixes[mix]) / statistics.median(seconds), 1),
                "latency_p50_seconds": round(statistics.median(latencies), 3),
                "latency_p95_seconds": round(statistics.quantiles(latencies, n=20)[-1], 3),
            }
        )
    return rows


def _load(target: Target, wanted: list[int], concurrency: int) -> Run:
    requests = [Request(PROMPT, length) for length in wanted]
    run = drive(target, requests, Closed(concurrency), 0, TIMEOUT_S)
    if failed := [record.error for record in run.records if record.error]:
        raise RuntimeError(f"{len(failed)} of {len(requests)} requests failed: {failed[0]}")
    return run


def _print_table(title: str, rows: list[dict[str, object]]) -> None:
    columns = [name for name in rows[0] if name != "seconds"]
    print(f"\n{title}\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(str(row[name]) for name in columns)} |")


def main() -> None:
    """Parse the options, measure, write and print."""
    parser = argparse.ArgumentParser(prog="make bench-inflight", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("perf/results/inflight.json"))
    parser.add_argument("--requests", type=int, default=96, help="of each mix of lengths")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2, choices=range(1, 4))
    options = parser.parse_args()
    # As in the measured servers: on the small model a second thread costs more than it gains.
    torch.set_num_threads(1)
    tables = {
        "schedulers": schedulers(options.requests, options.concurrency, options.repetitions),
        "prefill_bound": prefill_bounds([32, 64, 128, 256, 512], 8 * options.repetitions),
    }
    result = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": environment.describe(), **tables}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for section, rows in tables.items():
        _print_table(section, rows)
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
