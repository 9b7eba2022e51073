"""LangChain's ChatOpenAI in a loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from langchain_openai import ChatOpenAI

from perf.soak.library_loops.loop import serve


def ask(asked: Mapping[str, Any]) -> Mapping[str, object]:
    """Send a chat, streamed or not."""
    chat = ChatOpenAI(
        model=os.environ["SOAK_MODEL"],
        max_retries=0,
        max_tokens=asked["max_tokens"],
        temperature=asked["temperature"],
        stream_usage=True,
    )
    if asked["streamed"]:
        first, *others = chat.stream(asked["prompt"])
        answer = sum(others, first)
    else:
        answer = chat.invoke(asked["prompt"])
    return {
        "text": answer.content,
        "tokens": answer.usage_metadata["output_tokens"],
        "finish_reason": answer.response_metadata["finish_reason"],
    }


serve(ask)
