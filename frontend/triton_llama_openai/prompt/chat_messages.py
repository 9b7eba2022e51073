"""Messages of a chat from the forms that other APIs give them."""

from __future__ import annotations

from collections.abc import Sequence

from triton_llama_openai.protocol.sampling import SamplingFields
from triton_llama_openai.protocol.schema import JsonObject


def sampling_fields(body: SamplingFields) -> JsonObject:
    """Return the fields that a request shares with a chat."""
    return {name: getattr(body, name) for name in SamplingFields.model_fields}


def function_call(call_id: str, name: str, arguments: str) -> JsonObject:
    """Return a call of an assistant's message. arguments: JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(texts: Sequence[str], calls: Sequence[JsonObject], reasoning: Sequence[str]) -> list[JsonObject]:
    """Return the message of an answer; none for reasoning alone, whose answer is missing."""
    if not texts and not calls:
        return []
    message: JsonObject = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    return [message]
