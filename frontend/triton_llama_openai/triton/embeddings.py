"""Embeddings of one request's inputs: each is a request to Triton, and several run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from triton_llama.outputs import EMBEDDING_OUTPUT_NAMES
from triton_llama.tensors import Tensor

from triton_llama_openai.errors import ApiError
from triton_llama_openai.protocol.embeddings import EmbeddingRequest
from triton_llama_openai.protocol.prompts import Prompt
from triton_llama_openai.record import RequestRecord
from triton_llama_openai.settings import Settings
from triton_llama_openai.triton.inputs import prompt_tensors, with_api_errors
from triton_llama_openai.triton.merge import ChunkStream, merge
from triton_llama_openai.triton.resumption import Resumption, TritonRequest
from triton_llama_openai.triton.shared_prefixes import replica_key

if TYPE_CHECKING:
    from triton_llama_openai.served.served_model import ServedModel

_AT_ONCE = 32
"""Inputs of one request in Triton at the same time: the slots of the default config, which has a queue of 256."""
_FIELDS = {
    "text_input": "input",
    "input_ids": "input",
    "priority": "priority",
    "lora_name": "model",
}
"""The request's field for each input of the model, for the model's errors."""


async def embed(
    request: EmbeddingRequest, prompts: Sequence[Prompt], model: ServedModel, settings: Settings, record: RequestRecord
) -> list[NDArray[np.float32]]:
    """Return the embedding [embedding_size] of each prompt, in order. record: gets the number of their tokens.

    Cancelling it cancels what still runs. Raises ApiError.
    """
    free = asyncio.Semaphore(_AT_ONCE)

    def stream(number: int, prompt: Prompt) -> ChunkStream:
        tensors = [*prompt_tensors(prompt, model), Tensor("return_embedding", "BOOL", (True,))]
        if request.priority is not None:
            tensors.append(Tensor("priority", "INT32", (request.priority,)))
        triton_request = TritonRequest(
            id=f"{record.id}-{number}",
            tensors=tensors,
            outputs=EMBEDDING_OUTPUT_NAMES,
            choices=range(number, number + 1),
            key=replica_key(record.session, None, prompt, record.adapter, None),
            timeout=settings.request_timeout,
            resume_timeout=settings.resume_timeout,
            streamed=False,
        )
        resumed = Resumption(triton_request, model.triton, record).chunks()
        return _when_free(free, with_api_errors(resumed, _FIELDS, number, len(prompts)))

    embeddings: dict[int, NDArray[np.float32]] = {}
    async with aclosing(merge([stream(number, prompt) for number, prompt in enumerate(prompts)])) as merged:
        async for chunks in merged:
            for chunk in chunks:
                if chunk.embedding is None:
                    raise ApiError(500, "the server's answer lacks the output embedding", None, "internal_error")
                embeddings[chunk.index] = chunk.embedding
                record.prompt_tokens += chunk.num_input_tokens
    return [embeddings[number] for number in range(len(prompts))]


async def _when_free(free: asyncio.Semaphore, stream: ChunkStream) -> ChunkStream:
    async with free, aclosing(stream):
        async for chunks in stream:
            yield chunks
