"""/v1/embeddings: texts or tokens to vectors."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from triton_llama_openai.errors import invalid
from triton_llama_openai.output.answers import dumps, until_disconnect
from triton_llama_openai.prompt.tokenizer import PromptTokenizer
from triton_llama_openai.protocol.embeddings import EmbeddingRequest
from triton_llama_openai.protocol.prompts import Prompt
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.request_body import parse_request
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings
from triton_llama_openai.triton.embeddings import embed
from triton_llama_openai.triton.inputs import check_lengths


def add_embeddings(router: APIRouter, models: Models, settings: Settings) -> None:
    """Add the route."""

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(request: Request) -> Response:
        """Texts or tokens as vectors, one input or several (docs/openai.md#embeddings)."""
        body = await parse_request(request, EmbeddingRequest, settings)
        record = request.state.record
        model = await models.find_for("embed", body.model, record)
        if body.dimensions is not None and body.dimensions > model.embedding_size:
            bound = f"at most {model.embedding_size}, the size of this model's embeddings"
            raise invalid("dimensions", body.dimensions, bound)
        record.prompt = body.input
        # In threads: the tokenizer and the numbers of long lists take long.
        prompts = await asyncio.to_thread(_prompts, body, model.tokenizer)
        vectors = await until_disconnect(request, embed(body, prompts, model, settings, record))
        usage = {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens}
        head: JsonObject = {"object": "list", "model": model.name, "usage": usage}
        return Response(await asyncio.to_thread(_encoded, head, body, vectors), media_type="application/json")


def _prompts(body: EmbeddingRequest, tokenizer: PromptTokenizer) -> list[Prompt]:
    """Return the inputs as they are computed. Raises ApiError."""
    count, room = body.truncate_prompt_tokens, tokenizer.context - 1
    if count is not None and count > room:
        raise invalid("truncate_prompt_tokens", count, f"-1, or 1 … {room} (max_model_len - 1)")
    inputs = body.inputs
    if count is not None:
        inputs = [tokenizer.first_ids(prompt, room if count < 0 else count) for prompt in inputs]
    check_lengths("input", inputs, tokenizer.context)
    return inputs


def _encoded(head: JsonObject, body: EmbeddingRequest, vectors: list[NDArray[np.float32]]) -> bytes:
    """Return the answer as JSON."""
    data = [
        {"object": "embedding", "index": index, "embedding": _values(body, vector)}
        for index, vector in enumerate(vectors)
    ]
    return dumps(head | {"data": data})


def _values(body: EmbeddingRequest, vector: NDArray[np.float32]) -> object:
    if body.dimensions is not None:
        vector = vector[: body.dimensions]
        # The bound of PyTorch's normalize, below which a length counts as 0.
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
