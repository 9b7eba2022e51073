"""The client library against a real Triton that runs the real model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from triton_llama import (
    AsyncLlamaClient,
    Completion,
    LlamaClient,
    LlamaTimeoutError,
    ModelNotFoundError,
    RejectedInputError,
    SamplingParams,
    ServerStatus,
)
from triton_llama.endpoint import Protocol
from triton_local.server import LocalTriton

PROMPTS = [
    "The for statement is used to",
    "A list",
    "Return the",
    "def ",
    "An exception is",
    "Raise a",
    "In Python",
    "x",
]


def address(triton: LocalTriton, protocol: Protocol) -> str:
    return triton.http_url if protocol == "http" else triton.grpc_url


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return "http" if request.param == "http" else "grpc"


@pytest.fixture
def client(triton: LocalTriton, protocol: Protocol) -> Iterator[LlamaClient]:
    with LlamaClient(address(triton, protocol), protocol, concurrency=5) as client:
        yield client


def check(completion: Completion, *, max_tokens: int) -> None:
    assert completion.finish_reason in ("stop", "length")
    assert completion.num_input_tokens >= 1
    assert 1 <= completion.num_output_tokens <= max_tokens
    assert re.fullmatch("[0-9a-f]{32}", completion.request_id)


def check_status(status: ServerStatus) -> None:
    assert status.live
    assert status.ready
    assert status.model_ready
    assert status.server == "triton"
    assert status.server_version
    assert status.config is not None
    assert status.config.backend == "python"
    assert status.config.preferred_batch_sizes == (4, 8, 16, 32)
    assert status.config.max_queue_delay_microseconds == 10000
    assert not status.config.decoupled
    assert status.config.parameters["quantization"] == "int8"


def test_the_reported_seed_makes_the_same_text_again(client: LlamaClient) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0)
    first = client.generate(PROMPTS[0], params)
    check(first, max_tokens=12)
    again = client.generate(PROMPTS[0], params, seed=first.seed)
    assert first.text
    assert again.text == first.text
    assert again.request_id != first.request_id


def test_inputs_that_are_left_out_are_the_checkpoints(client: LlamaClient) -> None:
    check(client.generate(PROMPTS[0], SamplingParams.from_checkpoint(), max_tokens=4), max_tokens=4)


def test_completions_of_a_list_come_back_in_its_order(client: LlamaClient) -> None:
    prompts = [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS]
    completions = client.generate(prompts, max_tokens=4, exclude_input_in_output=False)
    assert len({completion.request_id for completion in completions}) == len(prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.text.startswith(prompt)


def test_eight_threads_may_share_a_client(client: LlamaClient) -> None:
    def several(prompt: str) -> list[Completion]:
        one_by_one = [client.generate(prompt, max_tokens=4, exclude_input_in_output=False) for _ in range(2)]
        return one_by_one + client.generate([prompt, prompt], max_tokens=4, exclude_input_in_output=False)

    with ThreadPoolExecutor(8) as threads:
        for prompt, completions in zip(PROMPTS, threads.map(several, PROMPTS), strict=True):
            assert [completion.text.startswith(prompt) for completion in completions] == [True] * 4


def test_a_refused_or_late_request_is_its_error_and_the_client_goes_on(client: LlamaClient) -> None:
    with pytest.raises(RejectedInputError, match="temperature"):
        client.generate(PROMPTS[0], temperature=7.0)
    with pytest.raises(LlamaTimeoutError):
        client.generate(PROMPTS[0], max_tokens=32, timeout=0.001)
    outcomes = client.generate([PROMPTS[0], "", PROMPTS[1]], max_tokens=2, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Completion, RejectedInputError, Completion]
    with pytest.raises(RejectedInputError, match="text_input") as error:
        client.generate([PROMPTS[0], "", PROMPTS[1]], max_tokens=2)
    assert error.value.prompt_index == 1


def test_a_model_that_is_not_there_is_named(triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(triton, protocol), protocol, model="no-such-model") as client:
        with pytest.raises(ModelNotFoundError, match="no-such-model"):
            client.generate(PROMPTS[0])
        status = client.status()
    assert status.live
    assert not status.model_ready
    assert status.config is None


def test_status_tells_the_live_configuration(client: LlamaClient) -> None:
    check_status(client.status())


async def test_the_async_client_does_the_same(triton: LocalTriton, protocol: Protocol) -> None:
    async with AsyncLlamaClient(address(triton, protocol), protocol, concurrency=5) as client:
        check_status(await client.status())
        check(await client.generate(PROMPTS[0], max_tokens=4), max_tokens=4)
        outcomes = await client.generate([PROMPTS[0], ""], max_tokens=2, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Completion, RejectedInputError]
        with pytest.raises(RejectedInputError, match="temperature"):
            await client.generate(PROMPTS[0], temperature=7.0)
        with pytest.raises(LlamaTimeoutError):
            await client.generate(PROMPTS[0], max_tokens=32, timeout=0.001)
        many = await asyncio.gather(*(client.generate(prompt, max_tokens=2) for prompt in PROMPTS))
        assert len({completion.request_id for completion in many}) == len(PROMPTS)


async def test_a_cancelled_task_leaves_the_client_usable(triton: LocalTriton, protocol: Protocol) -> None:
    async with AsyncLlamaClient(address(triton, protocol), protocol) as client:
        task = asyncio.create_task(client.generate(PROMPTS, max_tokens=64))
        for _ in range(3):
            # Let it get as far as the socket; no answer is that quick.
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        check(await client.generate(PROMPTS[0], max_tokens=2), max_tokens=2)
