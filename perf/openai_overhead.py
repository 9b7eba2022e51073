"""What the OpenAI endpoint costs: the same load over tritonclient's gRPC streams and through the endpoint, in one run.

    python -m perf.openai_overhead --seconds 20 --rounds 3

All are streamed greedily, with the same prompts and lengths, from one server under the config `streaming`; rounds
alternate between them, so that a slower minute of the machine meets all. The endpoint is there twice: as it is, where
tokens of 20 ms share a chunk, and with a chunk for every token, as the gRPC streams have. The bounds are on the first:
at 32 streams at most 5 % less throughput, and TTFT at most 10 ms more. On a CPU the endpoint and the model share the
cores, so the machine's cores are part of the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from triton_llama import AsyncLlamaClient, SamplingParams
from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.server import LocalTriton

from perf.command import count, given, positive
from perf.results_file import Results

PROMPT = "Return a list of"
LARGEST_LOSS, LARGEST_DELAY_S = 0.05, 0.010
WARM_UP_S = 3.0

Stream = Callable[[], AsyncIterator[int]]
"""Yields, for each chunk of one request, the tokens that it counts: its own, or all of them at the end."""

Rounds = dict[str, list[tuple[float, float]]]
"""Of each way, each round's tokens per second of all streams together, and median TTFT in seconds."""


async def measure(stream: Stream, streams: int, seconds: float) -> tuple[float, float]:
    """Keep `streams` requests running for a time; the rate is over the time until the last one has ended."""
    firsts: list[float] = []
    tokens = 0
    began = time.perf_counter()

    async def user() -> None:
        nonlocal tokens
        while (sent := time.perf_counter()) < began + seconds:
            first = True
            async for counted in stream():
                if first:
                    firsts.append(time.perf_counter() - sent)
                    first = False
                tokens += counted

    await asyncio.gather(*(user() for _ in range(streams)))
    return tokens / (time.perf_counter() - began), statistics.median(firsts)


def over_grpc(client: AsyncLlamaClient, tokens: int) -> Stream:
    """Return streams of this project's client, which are tritonclient's stubs."""
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens)

    async def stream() -> AsyncIterator[int]:
        async with client.stream(PROMPT, params) as running:
            async for piece in running:
                yield piece.num_output_tokens

    return stream


def over_openai(client: aiohttp.ClientSession, endpoint: OpenAIEndpoint, tokens: int) -> Stream:
    """Return streams of the endpoint. Only the event with the counts is parsed: this generator shares the cores."""
    body = {"model": endpoint.served_name, "prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"temperature": 0, "repetition_penalty": 1, "max_tokens": tokens, "min_tokens": tokens}

    async def stream() -> AsyncIterator[int]:
        async with client.post(f"{endpoint.url}/completions", json=body, raise_for_status=True) as response:
            received = b""
            async for data in response.content.iter_any():
                received += data
                yield 0
            (counts,) = (line for line in received.splitlines() if b'"choices":[]' in line)
            yield json.loads(counts.removeprefix(b"data: "))["usage"]["completion_tokens"]

    return stream


async def compare(server: LocalTriton, endpoints: Mapping[str, OpenAIEndpoint], options: argparse.Namespace) -> Rounds:
    """Run the rounds, one of each way after the other; a first, short one of each warms up."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    async with (
        AsyncLlamaClient(server.grpc_url, protocol="grpc") as grpc,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        ways = {"grpc": over_grpc(grpc, options.tokens)}
        ways |= {way: over_openai(http, endpoint, options.tokens) for way, endpoint in endpoints.items()}
        for stream in ways.values():
            await measure(stream, options.streams, min(WARM_UP_S, options.seconds))
        rounds: Rounds = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, stream in ways.items():
                rounds[way].append(await measure(stream, options.streams, options.seconds))
                rate, ttft = rounds[way][-1]
                print(f"{way:20} {rate:8.0f} tokens/s, TTFT {ttft * 1e3:6.1f} ms", flush=True)
    return rounds


def verdict(rounds: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Return medians of all ways, what the endpoint costs, and whether it is within the bounds."""
    throughput = {way: statistics.median(rate for rate, _ in made) for way, made in rounds.items()}
    ttft = {way: statistics.median(first for _, first in made) for way, made in rounds.items()}
    # Rounded to a millionth: 1 - 950 / 1000 is a little more than 0.05.
    loss = round(1 - throughput["openai"] / throughput["grpc"], 6)
    delay = round(ttft["openai"] - ttft["grpc"], 6)
    return {
        "tokens_per_second": throughput,
        "ttft_seconds": ttft,
        "loss": loss,
        "delay_seconds": delay,
        "within_bounds": loss <= LARGEST_LOSS and delay <= LARGEST_DELAY_S,
    }


def main() -> None:
    """Start all, run the rounds, write and print the verdict."""
    parser = argparse.ArgumentParser(prog="python -m perf.openai_overhead", description=__doc__)
    parser.add_argument("--streams", type=count, default=32)
    parser.add_argument("--tokens", type=count, default=100, help="of each request")
    parser.add_argument("--seconds", type=positive, default=20.0, help="of each round")
    parser.add_argument("--rounds", type=count, default=3, help="of each way")
    parser.add_argument("--output", type=Path, default=Path("perf/results/openai_overhead.json"))
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("streams", "tokens", "seconds", "rounds")}
    results = Results(options.output, "openai_overhead", {"model": "pydoc-llama", **settings}, resume=False)
    command = ["python", "-m", "perf.openai_overhead", *given(parser, options, [*settings])]
    results.section("command", shlex.join(command))
    with (
        LocalTriton(variant="streaming") as server,
        OpenAIEndpoint("127.0.0.1", 0, grace=10) as endpoint,
        OpenAIEndpoint("127.0.0.1", 0, grace=10) as every_token,
    ):
        endpoint.start(server.grpc_url, print)
        # The endpoint's processes have this one's environment.
        os.environ["TRITON_LLAMA_OPENAI_STREAM_INTERVAL_MS"] = "0"
        every_token.start(server.grpc_url, print)
        rounds = asyncio.run(compare(server, {"openai": endpoint, "openai, every token": every_token}, options))
    found = verdict(rounds)
    results.add(f"{options.streams} streams", {**found, "rounds": rounds})
    results.finish()
    print(f"{found}\nwritten to {options.output}")


if __name__ == "__main__":
    main()
