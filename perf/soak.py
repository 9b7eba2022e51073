"""Mixed load on a server and its endpoint for MINUTES: is every request answered, and is the processes' memory flat?

A round is the load of `make resumption` over OpenAI's protocol, which reaches the server over gRPC, and one of uniform
lengths over Triton's streams (HTTP), all at the same time. After each round, while the server is idle, the memory of
its processes is sampled (PSS: shared pages count once). Flat: the largest sample of the last quarter is at most
MAX_GROWTH_MIB above that of the quarter before. The first quarters don't count, because caches fill up. At the end both
are stopped and must end with code 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.server import LocalTriton

from perf.checkpoint import EMBEDDED
from perf.command import existing_checkpoint, make_command, positive
from perf.environment import pss_mib
from perf.load.generator import generate
from perf.load.protocols import Request, Target
from perf.load.workload import requests
from perf.results_file import RESULTS, Results
from perf.resumption.__main__ import GRACE_S, ROUND_S, USERS, Requests, load
from perf.resumption.workload import mixed

MAX_GROWTH_MIB = 16.0
REQUESTS = 64
"""Requests of each protocol in a round."""
MEAN_OUTPUT = 40
MIN_ROUNDS = 8
QUIET = {"LLAMA_LOG_REQUESTS": "none"}
_READY_S = 900.0


def main() -> int:
    """Soak, write the result and print it. Returns 0 if it passed, else 1."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=30.0, help="default 30")
    parser.add_argument("--model", type=existing_checkpoint, default=EMBEDDED, help="a checkpoint, context 512 or more")
    options = parser.parse_args()
    settings = {"model": options.model.name, "users": 3 * USERS, "max_growth_mib": MAX_GROWTH_MIB}
    results = Results(RESULTS / "soak.json", "soak", settings, make_command("soak"))
    faults: list[str] = []
    samples: list[dict[str, float]] = []
    plain, chats = requests(options.model, "uniform", REQUESTS, MEAN_OUTPUT), mixed(options.model, REQUESTS)
    os.environ["TRITON_LLAMA_OPENAI_LOG_REQUESTS"] = "none"
    with (
        LocalTriton(model=str(options.model), environment=QUIET, ready_timeout=_READY_S) as triton,
        OpenAIEndpoint("127.0.0.1", 0, GRACE_S) as endpoint,
    ):
        endpoint.start(triton.grpc_address)
        until = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until or len(samples) < MIN_ROUNDS:
            faults += one_round(triton, endpoint, plain, chats)
            samples.append(memory_mib(psutil.Process().children(recursive=True)))
            print(f"round {len(samples)}: {samples[-1]}, {len(faults)} faults", flush=True)
            results.add(f"round/{len(samples)}", samples[-1])
        endpoint.stop()
        triton.terminate()
        codes = {"the endpoint": endpoint.exit_code, "the server": triton.wait()}
    growth = {name: grown(values) for name, values in by_process(samples).items()}
    faults += [f"{name} grew by {mib:.1f} MiB" for name, mib in growth.items() if mib > MAX_GROWTH_MIB]
    faults += [f"{name} ended with code {code}" for name, code in codes.items() if code]
    results.section("growth_mib", growth)
    results.section("faults", faults)
    results.finish()
    print(*faults, sep="\n")
    print(f"{'FAILED' if faults else 'passed'}: {len(samples)} rounds, growth in MiB {growth}; perf/results/soak.json")
    return 1 if faults else 0


def one_round(triton: LocalTriton, endpoint: OpenAIEndpoint, plain: Sequence[Request], chats: Requests) -> list[str]:
    """Put a load on every protocol at the same time; return what went wrong."""
    target = Target("http", "triton_stream", f"http://{triton.http_address}", "llama")
    with ThreadPoolExecutor() as threads:
        streams = threads.submit(generate, target, plain, USERS, ROUND_S)
        answers = load(f"http://{endpoint.address}", endpoint.served_name, chats, lambda: False)
    records = [*streams.result(), *(record for each in answers.values() for record in each)]
    return [record.error for record in records if record.error]


def memory_mib(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """Return the processes' PSS in MiB, by what each is."""
    memory: dict[str, float] = {}
    for process in processes:
        # One may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline() or [process.name()]
            name = "openai" if "triton_llama_openai" in " ".join(words) else Path(words[0]).name
            memory[name] = round(memory.get(name, 0.0) + pss_mib(process), 1)
    return memory


def by_process(samples: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the samples of each process that is there in all of them."""
    names = set.intersection(*(set(sample) for sample in samples))
    return {name: [sample[name] for sample in samples] for name in sorted(names)}


def grown(values: Sequence[float]) -> float:
    """Return the maximum of the last quarter of the values minus the maximum of the third quarter, rounded to 0.1."""
    quarter = len(values) // 4
    return round(max(values[-quarter:]) - max(values[-2 * quarter : -quarter]), 1)


if __name__ == "__main__":
    sys.exit(main())
