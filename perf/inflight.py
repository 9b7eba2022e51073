"""In-flight batching against batches, and the prefill bound: `make bench-inflight`.

The first is measured through a real server, at three mixes of lengths: tokens per second of `scheduling: batch` and
`inflight`. Both run the default config, so the same weights, slots and queue; only the setting differs. Every request
generates exactly its length, the lengths of a mix have the same mean, and both schedulers get the same requests in the
same order at the same concurrency. With batches a slot stays empty from the end of its row to the end of the batch's
longest one, so the share that is lost is 1 - mean / (expected maximum of a batch).

The second is measured in one process, on the embedded checkpoint in INT8. Seven rows decode while prompts of 400 tokens
arrive, each as soon as the previous one has its first token. The gap between two tokens of a decoding row is the
duration of a step, and prefill adds to it; so a smaller bound on the prompt tokens of a step cuts the longest gaps and
makes new prompts wait for more steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings

from perf.command import count, make_command
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.load.protocols import Request, Target
from perf.load.records import Run
from perf.load.summary import percentiles
from perf.results_file import Results
from perf.servers.triton import local_triton
from perf.workload import MIXES, Mix, lengths

PROMPT = "Return a list of"
MEAN = 64
TIMEOUT_S = 600.0
REPETITIONS = 2

PREFILL_TOKENS = (32, 64, 128, 256, 512)
NEWCOMER = tuple(range(3, 403))
NEWCOMERS = 16
DECODING = 7


def schedulers(requests: int, concurrency: int) -> list[dict[str, object]]:
    """Measure both schedulers at all mixes; they alternate, so that a slow minute affects both."""
    mixes = {mix: lengths(mix, requests, MEAN) for mix in MIXES}
    runs: defaultdict[tuple[Mix, str], list[Run]] = defaultdict(list)
    for _ in range(REPETITIONS):
        for scheduling in ("batch", "inflight"):
            environment = {"OMP_NUM_THREADS": "1", "LLAMA_SCHEDULING": scheduling}
            with local_triton(variant="default", environment=environment) as server:
                target = Target(scheduling, "triton_generate", f"http://{server.http_url}", "llama")
                _load(target, mixes["equal"][:concurrency], concurrency)
                for mix, wanted in mixes.items():
                    runs[mix, scheduling].append(_load(target, wanted, concurrency))
    rows: list[dict[str, object]] = []
    for (mix, scheduling), measured in runs.items():
        seconds = [run.whole.seconds for run in measured]
        tokens = sum(record.output_tokens for record in measured[0].records)
        latencies = percentiles([record.latency for run in measured for record in run.records])
        rows.append(
            {
                "mix": mix,
                "scheduling": scheduling,
                "requests": requests,
                "concurrency": concurrency,
                "tokens": tokens,
                "seconds": [round(value, 3) for value in seconds],
                "tokens_per_second": round(tokens / statistics.median(seconds), 1),
                "latency_p50_seconds": latencies["p50"] / 1e3,
                "latency_p95_seconds": latencies["p95"] / 1e3,
            }
        )
    return rows


def _load(target: Target, wanted: list[int], concurrency: int) -> Run:
    run = drive(target, [Request(PROMPT, length) for length in wanted], Closed(concurrency), 0, TIMEOUT_S)
    if failed := [record.error for record in run.records if record.error]:
        raise RuntimeError(f"{len(failed)} of {len(wanted)} requests failed: {failed[0]}")
    return run


def prefill_bound(bound: int) -> dict[str, object]:
    """Measure the effect of a bound on prompt tokens per step."""
    settings = Settings.parse({"prefill_tokens": str(bound)}, {})
    engine = Engine(load_checkpoint(settings, torch.device("cpu")), settings, DECODING + 1)
    for _ in range(DECODING):
        request = GenerationRequest(prompt="", prompt_tokens=(5, 6, 7), max_tokens=400, min_tokens=400)
        engine.add(engine.sequence(request))
    while engine.step().decoded < DECODING:
        pass
    gaps: list[float] = []
    firsts: list[float] = []
    while len(firsts) < NEWCOMERS:
        entered = time.perf_counter()
        newcomer = engine.sequence(GenerationRequest(prompt="", prompt_tokens=NEWCOMER, max_tokens=1))
        engine.add(newcomer)
        finished = False
        while not finished:
            began = time.perf_counter()
            step = engine.step()
            gaps.append(time.perf_counter() - began)
            assert step.decoded == DECODING, "a decoding row has ended: fewer newcomers, please"
            finished = newcomer in step.finished
        firsts.append(time.perf_counter() - entered)
    gap = percentiles(gaps)
    return {
        "prefill_tokens": bound,
        "steps": len(gaps),
        **{f"gap_{name}_ms": gap[name] for name in ("p50", "p99", "max")},
        "time_to_first_token_p50_ms": round(1e3 * statistics.median(firsts), 2),
    }


def main() -> None:
    """Parse the options, measure, write and print."""
    parser = argparse.ArgumentParser(prog="make bench-inflight", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("perf/results/inflight.json"))
    parser.add_argument("--requests", type=count, default=96, help="of each mix of lengths (96)")
    parser.add_argument("--concurrency", type=count, default=64, help="(64)")
    options = parser.parse_args()
    # As in the measured servers: on the small model a second thread costs more than it gains.
    torch.set_num_threads(1)
    results = Results(options.output, "inflight", {"model": "pydoc-llama", "threads": 1}, resume=False)
    results.section("command", make_command("bench-inflight", {}))
    for name, rows in (
        ("schedulers", schedulers(options.requests, options.concurrency)),
        ("prefill_bound", [prefill_bound(tokens) for tokens in PREFILL_TOKENS]),
    ):
        results.section(name, rows)
        print(f"\n{name}", *rows, sep="\n")
    results.finish()
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
