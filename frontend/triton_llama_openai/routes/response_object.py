"""The response object: what the request asked for, the output, and what it cost."""

from __future__ import annotations

import time

from triton_llama.completion import Chunk

from triton_llama_openai.errors import ApiError
from triton_llama_openai.output.streaming import Json, dumps_with, join_array
from triton_llama_openai.prompt.conversation import PreparedChat
from triton_llama_openai.protocol.responses import ResponsesRequest
from triton_llama_openai.routes.response_output import Output, new_id

_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}


class ResponseObject:
    """One response while it is generated and after. output: of the conversation's only choice."""

    def __init__(self, request: ResponsesRequest, prepared: PreparedChat, output: Output) -> None:
        self.output = output
        self._prepared = prepared
        self._fields: Json = {"id": new_id("resp"), "object": "response", "created_at": int(time.time())}
        self._fields |= {"model": prepared.model.name, **_echo(request)}

    def whole(self, chunk: Chunk) -> bytes:
        """Return the object of an answer that isn't streamed, as JSON."""
        self.output.read(chunk)
        return self.body(self.output.status)

    def body(self, status: str, error: ApiError | None = None) -> bytes:
        """Return the object as JSON. status: `in_progress` has neither output nor usage. error: of `failed`.

        It tokenizes the reasoning: milliseconds for thousands of tokens.
        """
        ended = status != "in_progress"
        fields = self._fields | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": self._usage_body() if ended else None,
        }
        items = self.output.items if ended else []
        return dumps_with(fields, {"output": join_array(item.body() for item in items)})

    def _usage_body(self) -> Json:
        self._prepared.count_reasoning([self.output.parser])
        usage = self._prepared.generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _error(error: ApiError) -> Json:
    # The response's stream has begun, so 400 is about what the model makes of the prompt.
    return {"code": "invalid_prompt" if error.status == 400 else "server_error", "message": error.message}


def _echo(request: ResponsesRequest) -> Json:
    """Return the request's fields that the object repeats; null is the checkpoint's or the server's default."""
    reasoning = request.reasoning
    text: Json = {"format": {"type": "text"}}
    if request.text is not None and request.text.format is not None:
        text["format"] = request.text.format.model_dump(by_alias=True)
    if request.text is not None and request.text.verbosity is not None:
        text["verbosity"] = request.text.verbosity
    choice = request.tool_choice or "auto"
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": None,
        "store": False,
        "temperature": request.temperature,
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump(include=_TOOL_FIELDS) for tool in request.tools or []],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
