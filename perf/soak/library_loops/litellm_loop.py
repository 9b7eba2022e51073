"""LiteLLM's provider `openai/` in a loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import litellm

from perf.soak.library_loops.loop import serve

# It prints a list of providers for a name that it does not know.
litellm.suppress_debug_info = True


def ask(asked: Mapping[str, Any]) -> Mapping[str, object]:
    """Send a chat, streamed or not."""
    fields = {
        "model": f"openai/{os.environ['SOAK_MODEL']}",
        "api_base": os.environ["OPENAI_BASE_URL"],
        "messages": [{"role": "user", "content": asked["prompt"]}],
        "max_tokens": asked["max_tokens"],
        "temperature": asked["temperature"],
        "num_retries": 0,
        "max_retries": 0,
    }
    if asked["streamed"]:
        chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **fields))
        answer, usage = litellm.stream_chunk_builder(chunks), chunks[-1].usage
    else:
        answer = litellm.completion(**fields)
        usage = answer.usage
    choice = answer.choices[0]
    return {"text": choice.message.content, "tokens": usage.completion_tokens, "finish_reason": choice.finish_reason}


serve(ask)
