"""LlamaIndex's OpenAILike in a loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from perf.soak.library_loops.loop import serve


def ask(asked: Mapping[str, Any]) -> Mapping[str, object]:
    """Send a chat, streamed or not."""
    model = OpenAILike(
        model=os.environ["SOAK_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key="unused",
        is_chat_model=True,
        max_retries=0,
        context_window=512,
        max_tokens=asked["max_tokens"],
        temperature=asked["temperature"],
    )
    messages = [ChatMessage(role="user", content=asked["prompt"])]
    if not asked["streamed"]:
        answer = model.chat(messages)
        return {
            "text": answer.message.content,
            "tokens": answer.raw.usage.completion_tokens,
            "finish_reason": answer.raw.choices[0].finish_reason,
        }
    text, tokens, reason = "", 0, ""
    for chunk in model.stream_chat(messages, stream_options={"include_usage": True}):
        text += chunk.delta or ""
        tokens = chunk.raw.usage.completion_tokens if chunk.raw.usage else tokens
        reason = next((choice.finish_reason for choice in chunk.raw.choices if choice.finish_reason), reason)
    return {"text": text, "tokens": tokens, "finish_reason": reason}


serve(ask)
