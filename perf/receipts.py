"""What receipts cost, and how fast they are verified (`make bench-receipts`).

One server of each checkpoint, under the config `streaming` and without a prefix cache, and a closed loop of 1 and of 8
users over gRPC. In rounds, in turn: the same sampled requests without receipts, with receipts, and the verifications of
these receipts. A verification is one prefill of prompt and output: its rate counts the output's tokens alone, as the
rate of generation does. Writes one JSON file and prints a line for each measurement.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from triton_llama import LlamaClient, OverloadedError

from perf import workload
from perf.checkpoint import EMBEDDED, TINY_LLAMA, described, random_checkpoint
from perf.command import CORES, count, make_command
from perf.environment import StealTime
from perf.report.results import RESULTS
from perf.results_file import Results
from perf.servers.triton import our_server

USERS = (1, 8)
REQUESTS = {"embedded": (16, 64), "large": (4, 16)}
"""By model: requests a round for each number of users."""
KINDS = ("without", "with", "verified")
OUTPUT_TOKENS = 200
TIMEOUT_S = 600.0
T = TypeVar("T")
R = TypeVar("R")


def main() -> None:
    """Measure both checkpoints."""
    parser = argparse.ArgumentParser(prog="make bench-receipts", description=__doc__)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--only", choices=REQUESTS, help="measure this checkpoint alone")
    parser.add_argument("--requests", type=count, help="a round; default: by model and users")
    parser.add_argument("--output", type=Path, default=RESULTS / "receipts.json")
    options = parser.parse_args()
    checkpoints = {"embedded": lambda: EMBEDDED, "large": lambda: random_checkpoint(TINY_LLAMA)}
    settings = {"model": "two Llamas", "threads": CORES, "rounds": options.rounds, "output_tokens": OUTPUT_TOKENS}
    results = Results(options.output, "receipts", settings, make_command("bench-receipts"))
    for name in [options.only] if options.only else REQUESTS:
        checkpoint = checkpoints[name]()
        server = our_server("streaming_int8", "streaming INT8", "streaming", "int8")
        with server.start(checkpoint, CORES) as running, ExitStack() as stack:
            assert running.triton is not None
            client = stack.enter_context(LlamaClient(running.triton.grpc_url, "grpc", timeout=TIMEOUT_S))
            _warm_up(client)
            for users, requests in zip(USERS, REQUESTS[name], strict=True):
                steal = StealTime()
                rates = dict[str, list[float]]()
                for number in range(options.rounds):
                    for kind, rate in _round(client, checkpoint, users, options.requests or requests, number):
                        rates.setdefault(kind, []).append(rate)
                        print(f"{name}, {users} users, round {number + 1}, {kind}: {rate:,.1f} tokens/s", flush=True)
                row = {"model": described(checkpoint), "title": name, "users": users, "tokens_per_second": rates}
                row |= {"stolen_share": steal.share(), "settings": running.settings}
                results.add(f"{name}/{users}", row)
    results.finish()


def _warm_up(client: LlamaClient) -> None:
    """Verify a receipt, once the server knows its checkpoint's digest."""
    while True:
        try:
            assert client.verify(client.generate("def", max_tokens=9, receipt=True).receipt or "").equal
        except OverloadedError:
            time.sleep(1.0)
        else:
            return


def _round(
    client: LlamaClient, checkpoint: Path, users: int, requests: int, number: int
) -> Iterator[tuple[str, float]]:
    """Yield the tokens/s of each of KINDS."""
    prompts = workload.prompts(checkpoint, requests)
    seeds = random.Random(number)
    jobs = [(prompt, seeds.getrandbits(64)) for prompt in prompts]

    def generate(job: tuple[str, int], receipt: bool) -> str:
        completion = client.generate(
            job[0], max_tokens=OUTPUT_TOKENS, min_tokens=OUTPUT_TOKENS, temperature=1.0, seed=job[1], receipt=receipt
        )
        assert completion.num_output_tokens == OUTPUT_TOKENS
        return completion.receipt or ""

    def verify(receipt: str) -> None:
        assert client.verify(receipt).equal

    _, seconds = _timed(lambda job: generate(job, receipt=False), jobs, users)
    yield KINDS[0], requests * OUTPUT_TOKENS / seconds
    receipts, seconds = _timed(lambda job: generate(job, receipt=True), jobs, users)
    yield KINDS[1], requests * OUTPUT_TOKENS / seconds
    _, seconds = _timed(verify, receipts, users)
    yield KINDS[2], requests * OUTPUT_TOKENS / seconds


def _timed(work: Callable[[T], R], jobs: list[T], users: int) -> tuple[list[R], float]:
    """Return the results, and the seconds, of jobs in a closed loop."""
    with ThreadPoolExecutor(users) as pool:
        began = time.perf_counter()
        done = list(pool.map(work, jobs))
        return done, time.perf_counter() - began


if __name__ == "__main__":
    main()
