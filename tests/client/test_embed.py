"""`embed` of both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest
from client.peers import HOST
from frontend.fake_triton import FakeTriton
from frontend.fake_triton_grpc import fake_triton
from grpc import StatusCode
from triton_llama import AsyncLlamaClient, LlamaClient, ServerError

Embed = Callable[[FakeTriton, Sequence[str]], None]


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as triton:
        yield triton


def embed(triton: FakeTriton, texts: Sequence[str]) -> None:
    with LlamaClient(f"{HOST}:{triton.port}", "grpc") as client:
        client.embed(texts)


def embed_async(triton: FakeTriton, texts: Sequence[str]) -> None:
    async def run() -> None:
        async with AsyncLlamaClient(f"{HOST}:{triton.port}", "grpc") as client:
            try:
                await client.embed(texts)
            finally:
                await asyncio.to_thread(triton.wait_for, lambda fake: fake.running == 0)

    asyncio.run(run())


both_clients = pytest.mark.parametrize("embed", [embed, embed_async], ids=["sync", "async"])


@both_clients
def test_after_an_error_the_texts_that_wait_are_not_sent(triton: FakeTriton, embed: Embed) -> None:
    triton.decoupled, triton.failing, triton.status = False, "INTERNAL: broken", StatusCode.INTERNAL
    with pytest.raises(ServerError, match="broken"):
        embed(triton, ["a"] * 1000)
    assert len(triton.requests) < 1000


def test_one_text_instead_of_several_is_refused(triton: FakeTriton) -> None:
    with pytest.raises(TypeError, match="texts is one str, must be a sequence of them"):
        embed(triton, "text")
