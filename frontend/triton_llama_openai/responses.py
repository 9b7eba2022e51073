"""/v1/responses: from a request's items through a conversation to a response, whole or streamed. Nothing is stored."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from triton_llama_openai.conversation import prepare_chat
from triton_llama_openai.models import Models
from triton_llama_openai.protocol.responses import ResponsesRequest
from triton_llama_openai.response_events import ResponseEvents
from triton_llama_openai.response_input import chat_request
from triton_llama_openai.response_object import ResponseObject
from triton_llama_openai.response_output import Output
from triton_llama_openai.settings import Settings
from triton_llama_openai.streaming import stream_answer, until_disconnect


async def answer_response(
    request: Request, body: ResponsesRequest, models: Models, settings: Settings, cache_salt: str | None
) -> Response:
    """Answer a request. cache_salt: the model's input. Raises ApiError or ClientLeftError."""
    model = models.find(body.model)
    chat = chat_request(body, settings.max_messages)
    prepared = prepare_chat(chat, model, settings, request.state.record, cache_salt)
    request.state.record.ignored += prepared.use.ignored
    generation = prepared.generation
    output = Output(prepared, chat.num_logprobs)
    response = ResponseObject(body, prepared, output)
    if body.stream:
        return await stream_answer(request, generation, ResponseEvents(response))
    (chunk,) = await until_disconnect(request, generation.whole())
    # In a thread: log probabilities are megabytes, and the reasoning is tokenized.
    return Response(await asyncio.to_thread(response.whole, chunk), media_type="application/json")
