"""The client library against a real Triton that runs the real model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
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

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def address(triton: LocalTriton, protocol: Protocol) -> str:
    return triton.http_url if protocol == "http" else triton.grpc_url


def check(completion: Completion, *, max_tokens: int) -> None:
    assert completion.finish_reason in ("stop", "length")
    assert completion.num_input_tokens >= 1
    assert 1 <= completion.num_output_tokens <= max_tokens
    assert re.fullmatch("[0-9a-f]{32}", completion.request_id)


@both_protocols
def test_a_prompt_gets_text_counts_and_a_reason(triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(triton, protocol), protocol) as client:
        completion = client.generate(PROMPTS[0], max_tokens=12)
    check(completion, max_tokens=12)
    assert completion.text


@both_protocols
def test_completions_of_a_list_come_back_in_its_order(triton: LocalTriton, protocol: Protocol) -> None:
    prompts = [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS]
    with LlamaClient(address(triton, protocol), protocol, concurrency=5) as client:
        completions = client.generate(prompts, max_tokens=4, exclude_input_in_output=False)
    assert len({completion.request_id for completion in completions}) == len(prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.text.startswith(prompt)


@both_protocols
def test_the_reported_seed_makes_the_same_text_again(triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(triton, protocol), protocol) as client:
        params = SamplingParams(max_tokens=12, temperature=1.0)
        first = client.generate(PROMPTS[0], params)
        again = client.generate(PROMPTS[0], params, seed=first.seed)
    assert again.text == first.text
    assert again.request_id != first.request_id


@both_protocols
def test_inputs_that_are_left_out_are_the_checkpoints(triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(triton, protocol), protocol) as client:
        completion = client.generate(PROMPTS[0], SamplingParams.from_checkpoint(), max_tokens=4)
    check(completion, max_tokens=4)


@both_protocols
def test_eight_threads_may_share_a_client(triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(triton, protocol), protocol) as client, ThreadPoolExecutor(8) as threads:

        def several(prompt: str) -> list[Completion]:
            one_by_one = [client.generate(prompt, max_tokens=4, exclude_input_in_output=False) for _ in range(2)]
            return one_by_one + client.generate([prompt, prompt], max_tokens=4, exclude_input_in_output=False)

        for prompt, completions in zip(PROMPTS, threads.map(several, PROMPTS), strict=True):
            assert [completion.text.startswith(prompt) for completion in completions] == [True] * 4


@both_protocols
def test_the_servers_refusal_names_the_input(triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(triton, protocol), protocol) as client:
        with pytest.raises(RejectedInputError, match="temperature"):
            client.generate(PROMPTS[0], temperature=7.0)
        with pytest.raises(RejectedInputError, match="text_input"):
            client.generate("")
        assert client.generate(PROMPTS[0], max_tokens=1).num_output_tokens == 1


@both_protocols
def test_a_refused_prompt_leaves_the_rest_of_its_list_alone(triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(triton, protocol), protocol) as client:
        outcomes = client.generate([PROMPTS[0], "", PROMPTS[1]], max_tokens=2, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Completion, RejectedInputError, Completion]
        with pytest.raises(RejectedInputError) as error:
            client.generate([PROMPTS[0], "", PROMPTS[1]], max_tokens=2)
    assert error.value.prompt_index == 1


@both_protocols
def test_a_request_that_takes_too_long_is_given_up_and_the_client_goes_on(
    triton: LocalTriton, protocol: Protocol
) -> None:
    with LlamaClient(address(triton, protocol), protocol) as client:
        with pytest.raises(LlamaTimeoutError):
            client.generate(PROMPTS[0], max_tokens=32, timeout=0.001)
        check(client.generate(PROMPTS[0], max_tokens=2), max_tokens=2)


@both_protocols
def test_a_model_that_is_not_there_is_named(triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(triton, protocol), protocol, model="no-such-model") as client:
        with pytest.raises(ModelNotFoundError, match="no-such-model"):
            client.generate(PROMPTS[0])
        status = client.status()
    assert status.live
    assert not status.model_ready
    assert status.config is None


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


@both_protocols
def test_status_tells_the_live_configuration(triton: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(address(triton, protocol), protocol) as client:
        check_status(client.status())


@both_protocols
async def test_the_async_twin_does_the_same(triton: LocalTriton, protocol: Protocol) -> None:
    async with AsyncLlamaClient(address(triton, protocol), protocol, concurrency=5) as client:
        check_status(await client.status())
        check(await client.generate(PROMPTS[0], max_tokens=4), max_tokens=4)
        completions = await client.generate(PROMPTS, max_tokens=4, exclude_input_in_output=False)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert completion.text.startswith(prompt)
        outcomes = await client.generate([PROMPTS[0], ""], max_tokens=2, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Completion, RejectedInputError]
        with pytest.raises(RejectedInputError, match="temperature"):
            await client.generate(PROMPTS[0], temperature=7.0)
        with pytest.raises(LlamaTimeoutError):
            await client.generate(PROMPTS[0], max_tokens=32, timeout=0.001)
        many = await asyncio.gather(*(client.generate(prompt, max_tokens=2) for prompt in PROMPTS))
        assert len({completion.request_id for completion in many}) == len(PROMPTS)


@both_protocols
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


def test_both_twins_have_the_same_names() -> None:
    def public(kind: type[object]) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(LlamaClient) == public(AsyncLlamaClient)
    pairs: list[tuple[Callable[..., object], Callable[..., object]]] = [
        (LlamaClient.__init__, AsyncLlamaClient.__init__),
        (LlamaClient.generate, AsyncLlamaClient.generate),
        (LlamaClient.status, AsyncLlamaClient.status),
    ]
    for sync, twin in pairs:
        assert sync.__annotations__ == twin.__annotations__
