"""The worker's class by Dynamo's contract of `LLMEngine`, without a frontend, in the spirit of Dynamo's own tests.

test_dynamo.py runs them with the pytest of Dynamo's environment, in front of a real Triton.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dynamo.common.backend import LlmRegistration
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument
from dynamo.runtime import Context
from triton_llama.address import ServerAddress
from triton_llama_dynamo.engine import TritonEngine
from triton_llama_openai.triton.triton_client import TritonClient

pytestmark = pytest.mark.asyncio
PROMPT = [5, 6, 7, 8]
ADDRESSES = ["--triton", os.environ["TRITON"], "--triton-metrics", os.environ["TRITON_METRICS"]]


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[TritonEngine]:
    engine, _ = await TritonEngine.from_args(ADDRESSES)
    yield engine
    await engine.cleanup()


def request_of(max_tokens: int | None = 8, **fields: object) -> dict[str, Any]:
    return {
        "token_ids": PROMPT,
        "sampling_options": {"temperature": 0.0},
        "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
        **fields,
    }


async def answer_of(engine: TritonEngine, request: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk async for chunk in engine.generate(request, Context())]


def ids_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


async def test_start_returns_what_triton_can_hold(engine: TritonEngine) -> None:
    config = await engine.start(1)
    assert config.llm == LlmRegistration(
        context_length=2048, kv_cache_block_size=16, total_kv_blocks=4096, max_num_seqs=32
    )
    assert json.loads((Path(config.model) / "config.json").read_text())["eos_token_id"] == [2]


async def test_packed_token_ids_are_unpacked(engine: TritonEngine) -> None:
    packed = b"".join(token.to_bytes(4, "little") for token in PROMPT)
    same = [await answer_of(engine, request_of(token_ids=ids)) for ids in (PROMPT, packed)]
    assert ids_of(same[0]) == ids_of(same[1])


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": -7, "top_k": -1}])
async def test_a_migrated_request_continues_with_the_same_tokens(
    engine: TritonEngine, sampling: dict[str, Any]
) -> None:
    whole = ids_of(await answer_of(engine, request_of(16, sampling_options=sampling)))
    rest = await answer_of(engine, request_of(11, sampling_options=sampling, token_ids=[*PROMPT, *whole[:5]]))
    assert ids_of(rest) == whole[5:]


async def test_without_max_tokens_the_answer_fills_the_context(engine: TritonEngine) -> None:
    chunks = await answer_of(engine, request_of(None, token_ids=PROMPT * 500))
    assert chunks[-1]["completion_usage"]["total_tokens"] == 2048


async def test_a_hidden_stop_token_ends_the_answer(engine: TritonEngine) -> None:
    ids = ids_of(await answer_of(engine, request_of()))
    stopping = {"max_tokens": 8, "stop_token_ids_hidden": [ids[2]]}
    chunks = await answer_of(engine, request_of(stop_conditions=stopping))
    assert chunks[-1]["finish_reason"] == "stop"
    assert ids_of(chunks) == ids[: ids.index(ids[2]) + 1]


async def test_log_probabilities_are_those_of_the_tokens(engine: TritonEngine) -> None:
    chunks = await answer_of(engine, request_of(output_options={"logprobs": 2, "prompt_logprobs": 1}))
    for chunk in chunks:
        assert [entries[0]["token_id"] for entries in chunk["top_logprobs"]] == chunk["token_ids"]
        assert [entries[0]["logprob"] for entries in chunk["top_logprobs"]] == chunk["log_probs"]
    assert len(chunks[-1]["engine_data"]["prompt_logprobs"]) == len(PROMPT)


async def test_a_cancelled_request_ends_early(engine: TritonEngine) -> None:
    context = Context()
    chunks: list[dict[str, Any]] = []
    async for chunk in engine.generate(request_of(1500), context):
        chunks.append(chunk)
        context.stop_generating()
    assert chunks[-1]["finish_reason"] == "cancelled"
    assert len(ids_of(chunks)) < 1500


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": PROMPT * 512}, "the prompt has 2048 tokens"),
        ({"sampling_options": {"n": 2}}, "n is 2"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"top_p": 2.0}}, "top_p is 2"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(
    engine: TritonEngine, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await answer_of(engine, request_of(**fields))


async def test_the_health_check_passes_generate(engine: TritonEngine) -> None:
    chunks = await answer_of(engine, await engine.health_check_payload())
    assert len(ids_of(chunks)) == 1


async def test_a_lost_triton_ends_requests_with_the_error_that_migrates_them(
    engine: TritonEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    description = await TritonClient(ServerAddress.parse(os.environ["TRITON"], "grpc"), "llama").description("", 60)
    assert description is not None
    closed = TritonClient(ServerAddress.parse("127.0.0.1:9", "grpc"), "llama")
    lost = TritonEngine(closed, description, "127.0.0.1:9", tmp_path, None)
    with pytest.raises(EngineShutdown, match="no connection"):
        await answer_of(lost, request_of())
    assert not lost.lost
    await lost.on_endpoint_ready(None)
    async with asyncio.timeout(60):
        while not lost.lost:
            await asyncio.sleep(0.01)
    assert len(signals) == 1
    await lost.cleanup()
