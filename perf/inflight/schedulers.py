"""Tokens per second of `scheduling: batch` against `inflight`, through a real server, at three mixes of lengths.

Both run the default config, so the same weights, slots and queue; only the setting differs. Every request generates
exactly its length (min_tokens = max_tokens), the lengths of a mix have the same mean, and both schedulers get the same
requests in the same order at the same concurrency. With batches a slot stays empty from the end of its row to the end
of the batch's longest one, so the share that is lost is 1 - mean / (expected maximum of a batch).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence

from triton_llama import AsyncLlamaClient

from perf.servers.triton import local_triton

PROMPT = "Return a list of"
MEAN = 64
LONGEST = 400


def lengths(mix: str, count: int) -> list[int]:
    """Return `count` lengths of mean about 64 tokens: equal, uniform (8 … 120) or geometric (1 … 400)."""
    randomness = random.Random(mix)
    if mix == "equal":
        return [MEAN] * count
    if mix == "uniform":
        return [randomness.randint(8, 2 * MEAN - 8) for _ in range(count)]
    return [min(int(randomness.expovariate(1 / MEAN)) + 1, LONGEST) for _ in range(count)]


def compare(requests: int, concurrency: int, repetitions: int) -> list[dict[str, object]]:
    """Measure both schedulers at all mixes; they alternate, so that a slow minute affects both."""
    mixes = {mix: lengths(mix, requests) for mix in ("equal", "uniform", "geometric")}
    seconds: dict[tuple[str, str], list[float]] = {}
    latencies: dict[tuple[str, str], list[float]] = {}
    for _ in range(repetitions):
        for scheduling in ("batch", "inflight"):
            environment = {"OMP_NUM_THREADS": "1", "LLAMA_SCHEDULING": scheduling}
            with local_triton(environment=environment) as server:
                asyncio.run(_load(server.grpc_url, mixes["equal"][:concurrency], concurrency))
                for mix, wanted in mixes.items():
                    began = time.perf_counter()
                    taken = asyncio.run(_load(server.grpc_url, wanted, concurrency))
                    seconds.setdefault((mix, scheduling), []).append(time.perf_counter() - began)
                    latencies.setdefault((mix, scheduling), []).extend(taken)
    return [
        {
            "mix": mix,
            "scheduling": scheduling,
            "requests": requests,
            "concurrency": concurrency,
            "tokens": sum(mixes[mix]),
            "longest": max(mixes[mix]),
            "seconds": [round(value, 3) for value in taken],
            "tokens_per_second": round(sum(mixes[mix]) / statistics.median(taken), 1),
            "latency_p50_seconds": round(statistics.median(latencies[mix, scheduling]), 3),
            "latency_p95_seconds": round(statistics.quantiles(latencies[mix, scheduling], n=20)[-1], 3),
        }
        for (mix, scheduling), taken in seconds.items()
    ]


async def _load(url: str, wanted: Sequence[int], concurrency: int) -> list[float]:
    """Send the requests, `concurrency` at a time; return each one's latency in seconds."""
    places = asyncio.Semaphore(concurrency)

    async def one(client: AsyncLlamaClient, length: int) -> float:
        async with places:
            began = time.perf_counter()
            done = await client.generate(PROMPT, max_tokens=length, min_tokens=length, timeout=600)
            assert done.num_output_tokens == length
            return time.perf_counter() - began

    async with AsyncLlamaClient(url, protocol="grpc") as client:
        return await asyncio.gather(*(one(client, length) for length in wanted))
