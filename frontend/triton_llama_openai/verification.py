"""/v1/verify: a receipt to the tokens that the model draws again."""

from __future__ import annotations

import json
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from triton_llama.errors import ServerError, TritonLlamaError
from triton_llama.tensors import Tensor

from triton_llama_openai.engine_client import Chunk
from triton_llama_openai.errors import from_engine
from triton_llama_openai.load_balancer import prefix_of
from triton_llama_openai.models import Models
from triton_llama_openai.protocol.schema import CacheSalt, JsonObject, ModelName, Schema
from triton_llama_openai.resumption import EngineRequest, Resumption
from triton_llama_openai.settings import Settings
from triton_llama_openai.streaming import dumps, until_disconnect


class VerificationRequest(Schema):
    """A receipt to verify."""

    model: ModelName | None = None
    receipt: JsonObject
    cache_salt: CacheSalt | None = None


async def answer_verification(
    request: Request, body: VerificationRequest, models: Models, settings: Settings, cache_salt: str | None
) -> Response:
    """Answer a request. cache_salt: the model's input. Raises ApiError or ClientLeftError."""
    model, record = models.find(body.model), request.state.record
    receipt = json.dumps(body.receipt)
    tensors = [Tensor("verify_receipt", "BYTES", (receipt,))]
    if cache_salt is not None:
        tensors.append(Tensor("cache_salt", "BYTES", (cache_salt,)))
    ids = body.receipt.get("prompt_ids")
    prefix = prefix_of(ids if isinstance(ids, list) else "", cache_salt)
    timeouts = settings.request_timeout, settings.resume_timeout
    verifying = Resumption(EngineRequest(record.id, tensors, range(1), prefix, *timeouts), model.balancer, record)
    try:
        chunk = await until_disconnect(request, _only_chunk(verifying))
    except TritonLlamaError as error:
        raise from_engine(error, {"verify_receipt": "receipt"}) from error
    record.prompt_tokens = chunk.num_input_tokens
    answer = {"object": "verification", "model": model.name, **(chunk.verification or {})}
    return Response(dumps(answer), media_type="application/json")


async def _only_chunk(verifying: Resumption) -> Chunk:
    async with aclosing(verifying.chunks()) as responses:
        chunks = [chunk async for response in responses for chunk in response]
    if len(chunks) != 1 or chunks[0].verification is None:
        raise ServerError(f"the server answered a receipt with {len(chunks)} chunks, must be one verification")
    return chunks[0]
