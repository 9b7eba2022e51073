"""The client's streams against a real Triton of the config `streaming`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server.fleet import Fleet
from server.metrics import Metrics
from triton_llama import (
    AsyncLlamaClient,
    Completion,
    LlamaClient,
    LlamaConnectionError,
    LlamaTimeoutError,
    ModelNotFoundError,
    RejectedInputError,
    SamplingParams,
)
from triton_llama.endpoint import Protocol
from triton_local.server import LocalTriton

PROMPTS = ["The for statement is used to", "Return a list of", "É 🙂 x", "def ", "An exception", "A", "In Python", "x"]
REQUESTS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=2**64 - 1),
    SamplingParams(max_tokens=40, temperature=1.3, seed=9223372036854775809, stop_words=["e", "the "]),
    SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, seed=5, bad_words=[" the"], exclude_input_in_output=False),
]
LONG = SamplingParams(max_tokens=400, min_tokens=400, temperature=1.0, seed=1)

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def address(server: LocalTriton, protocol: Protocol) -> str:
    return server.http_url if protocol == "http" else server.grpc_url


def same(streamed: Completion, whole: Completion) -> bool:
    return streamed == Completion(**{**vars(whole), "request_id": streamed.request_id, "seed": streamed.seed})


@both_protocols
@pytest.mark.parametrize("params", REQUESTS, ids=["greedy", "seeded", "stop words", "bad words and prompt"])
def test_the_pieces_joined_are_what_generate_gives(
    streaming: LocalTriton, protocol: Protocol, params: SamplingParams
) -> None:
    with LlamaClient(address(streaming, protocol), protocol) as client:
        for prompt in PROMPTS[:4]:
            with client.stream(prompt, params) as stream:
                pieces = list(stream)
            whole = client.generate(prompt, params)
            assert stream.text == "".join(piece.text for piece in pieces)
            assert same(stream.completion, whole)
            assert [bool(piece.finish_reason) for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@both_protocols
async def test_the_async_pieces_joined_are_what_generate_gives(streaming: LocalTriton, protocol: Protocol) -> None:
    async with AsyncLlamaClient(address(streaming, protocol), protocol) as client:
        for prompt, params in zip(PROMPTS, REQUESTS, strict=False):
            async with client.stream(prompt, params) as stream:
                pieces = [piece async for piece in stream]
            assert stream.text == "".join(piece.text for piece in pieces)
            assert same(stream.completion, await client.generate(prompt, params))


@both_protocols
def test_a_seed_of_64_bits_arrives_as_it_is(streaming: LocalTriton, protocol: Protocol) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0)
    with LlamaClient(address(streaming, protocol), protocol) as client:
        texts = {
            seed: client.generate("A list", params, seed=seed).text for seed in (2**64 - 1, 2**64 - 2, 2**53, 2**53 + 1)
        }
    assert len(set(texts.values())) == 4


@both_protocols
def test_a_list_goes_through_a_streaming_server_too(streaming: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(streaming, protocol), protocol) as client:
        completions = client.generate(PROMPTS, max_tokens=4, exclude_input_in_output=False)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert completion.text.startswith(prompt)
        with pytest.raises(RejectedInputError, match="temperature"):
            client.generate("def", temperature=7.0)


@both_protocols
def test_eight_threads_stream_at_once_on_one_client(streaming: LocalTriton, protocol: Protocol) -> None:
    params = SamplingParams(max_tokens=48, min_tokens=48, exclude_input_in_output=False)
    with LlamaClient(address(streaming, protocol), protocol) as client, ThreadPoolExecutor(8) as threads:

        def read(prompt: str) -> Completion:
            with client.stream(prompt, params) as stream:
                for _ in stream:
                    pass
            return stream.completion

        streamed = list(threads.map(read, PROMPTS))
        whole = client.generate(PROMPTS, params)
        for one, prompt, other in zip(streamed, PROMPTS, whole, strict=True):
            assert one.text.startswith(prompt)
            assert same(one, other)


@both_protocols
async def test_eight_tasks_stream_at_once_on_one_client(streaming: LocalTriton, protocol: Protocol) -> None:
    async with AsyncLlamaClient(address(streaming, protocol), protocol) as client:

        async def read(prompt: str) -> Completion:
            async with client.stream(prompt, max_tokens=48, exclude_input_in_output=False) as stream:
                async for _ in stream:
                    pass
            return stream.completion

        streamed = await asyncio.gather(*(read(prompt) for prompt in PROMPTS))
        for one, prompt in zip(streamed, PROMPTS, strict=True):
            assert one.text.startswith(prompt)


@both_protocols
def test_streams_that_are_left_give_their_slots_back(slow_streaming: LocalTriton, protocol: Protocol) -> None:
    metrics = Metrics(slow_streaming)
    with LlamaClient(address(slow_streaming, protocol), protocol) as client:
        # More than there are slots.
        for _ in range(40):
            with client.stream("def", LONG) as stream:
                next(stream)
        metrics.wait_for(40, "llama_requests_total", finish_reason="cancelled")
        metrics.wait(Metrics.idle, "no slot is in use")
        assert client.generate("def", max_tokens=2).num_output_tokens == 2


@both_protocols
async def test_async_streams_that_are_left_give_their_slots_back(streaming: LocalTriton, protocol: Protocol) -> None:
    metrics = Metrics(streaming)
    async with AsyncLlamaClient(address(streaming, protocol), protocol) as client:
        async with client.stream("def", LONG) as left:
            await anext(left)
        async for _ in client.stream("def", LONG):
            break

        async def read() -> None:
            async for _ in client.stream("def", LONG):
                begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(metrics.wait_for, 3, "llama_requests_total", finish_reason="cancelled")


@both_protocols
def test_a_stream_out_of_time_is_cancelled_on_the_server(streaming: LocalTriton, protocol: Protocol) -> None:
    metrics = Metrics(streaming)
    with LlamaClient(address(streaming, protocol), protocol) as client:
        with client.stream("def", LONG, timeout=0.2) as stream, pytest.raises(LlamaTimeoutError, match=r"0\.2 s"):
            list(stream)
        metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")


@both_protocols
def test_refusals_name_what_is_wrong(streaming: LocalTriton, triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(streaming, protocol), protocol) as client:
        with pytest.raises(RejectedInputError, match="temperature"):
            next(client.stream("def", temperature=7.0))
        with pytest.raises(RejectedInputError, match="text_input"):
            next(client.stream(""))
    with (
        LlamaClient(address(streaming, protocol), protocol, "no-such-model") as client,
        pytest.raises(ModelNotFoundError, match="no-such-model"),
    ):
        next(client.stream("def"))
    with (
        LlamaClient(address(triton, protocol), protocol) as client,
        pytest.raises(RejectedInputError, match="stream is true"),
    ):
        next(client.stream("def"))


@pytest.fixture
def killed(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("killed") as server:
        yield server


def test_a_server_that_is_killed_in_mid_stream_is_a_connection_error(killed: LocalTriton) -> None:
    with LlamaClient(killed.http_url) as http, LlamaClient(killed.grpc_url, "grpc") as grpc:
        streams = [client.stream("def", LONG) for client in (http, grpc)]
        for stream in streams:
            next(stream)
        killed.kill()
        for stream in streams:
            with pytest.raises(LlamaConnectionError):
                list(stream)
