"""The client library against a real Triton that runs the real model."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from triton_llama import AsyncLlamaClient, LlamaClient, LlamaTimeoutError, RejectedInputError, SamplingParams
from triton_llama.address import Protocol
from triton_local.server import LocalTriton

PROMPTS = ["The for statement is used to", "Return a list of", "É 🙂 x", "def ", "An exception", "A", "In Python", "x"]
REQUESTS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=2**64 - 1),
    SamplingParams(max_tokens=40, temperature=1.3, seed=9223372036854775809, stop_words=["e", "the "]),
    SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, seed=5, bad_words=[" the"], exclude_input_in_output=False),
]

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def address(triton: LocalTriton, protocol: Protocol) -> str:
    return triton.http_address if protocol == "http" else triton.grpc_address


@both_protocols
def test_a_refusal_or_a_timeout_harms_no_later_request(streaming: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(streaming, protocol), protocol) as client:
        with pytest.raises(RejectedInputError, match="temperature"):
            client.generate(PROMPTS[0], temperature=7.0)
        with pytest.raises(LlamaTimeoutError):
            client.generate(PROMPTS[0], max_tokens=500, min_tokens=500, timeout=0.001)
        times = client.generate(PROMPTS[0], max_tokens=2, return_perf_metrics=True).times
    assert times is not None
    assert times.arrival <= times.first_scheduled <= times.first_token <= times.last_token


@both_protocols
async def test_an_async_client_goes_on_after_a_cancelled_task(triton: LocalTriton, protocol: Protocol) -> None:
    async with AsyncLlamaClient(address(triton, protocol), protocol) as client:
        task = asyncio.create_task(client.generate(PROMPTS[0], max_tokens=64))
        for _ in range(3):
            # Let it get as far as the socket; no answer is that quick.
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        params = SamplingParams(max_tokens=4, exclude_input_in_output=False)
        completions = await asyncio.gather(*(client.generate(prompt, params) for prompt in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.text.startswith(prompt)
        assert 1 <= completion.num_output_tokens <= 4


@both_protocols
def test_chunks_joined_in_eight_threads_are_what_generate_gives(streaming: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(streaming, protocol), protocol) as client, ThreadPoolExecutor(8) as threads:

        def check(prompt: str, params: SamplingParams) -> None:
            with client.stream(prompt, params) as stream:
                chunks = list(stream)
            streamed, whole = stream.completion, client.generate(prompt, params)
            assert stream.text == "".join(chunk.text for chunk in chunks)
            assert [bool(chunk.finish_reason) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            # Drafts of the second answer can be taken from the first.
            own = ("request_id", "seed", "num_accepted_draft_tokens", "num_rejected_draft_tokens")
            assert streamed == replace(whole, **{name: getattr(streamed, name) for name in own})

        list(threads.map(check, PROMPTS, REQUESTS * 2))
