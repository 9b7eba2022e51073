"""A library's process: `python -m perf.soak.library_loop langchain`, in the environment of that library alone.

A request a line on stdin, an answer a line on stdout: see `perf.soak.libraries`. Nothing here needs another package.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

Asked = Mapping[str, Any]
Answer = tuple[str, int, str]
"""text, tokens, finish_reason."""


def langchain(asked: Asked) -> Answer:
    """Send a chat with LangChain's ChatOpenAI, streamed or not."""
    from langchain_openai import ChatOpenAI

    lengths = {"max_tokens": asked["max_tokens"], "temperature": asked["temperature"]}
    chat = ChatOpenAI(model=os.environ["SOAK_MODEL"], max_retries=0, stream_usage=True, **lengths)
    if asked["streamed"]:
        first, *others = chat.stream(asked["prompt"])
        answer = sum(others, first)
    else:
        answer = chat.invoke(asked["prompt"])
    return answer.content, answer.usage_metadata["output_tokens"], answer.response_metadata["finish_reason"]


def litellm(asked: Asked) -> Answer:
    """Send a chat with LiteLLM's provider `openai/`, streamed or not."""
    import litellm

    # It prints a list of providers for a name that it does not know.
    litellm.suppress_debug_info = True
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
    return answer.choices[0].message.content, usage.completion_tokens, answer.choices[0].finish_reason


def llama_index(asked: Asked) -> Answer:
    """Send a chat with LlamaIndex's OpenAILike, streamed or not."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

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
        return answer.message.content, answer.raw.usage.completion_tokens, answer.raw.choices[0].finish_reason
    text, tokens, reason = "", 0, ""
    for chunk in model.stream_chat(messages, stream_options={"include_usage": True}):
        text += chunk.delta or ""
        tokens = chunk.raw.usage.completion_tokens if chunk.raw.usage else tokens
        reason = next((choice.finish_reason for choice in chunk.raw.choices if choice.finish_reason), reason)
    return text, tokens, reason


def main() -> None:
    """Answer lines until stdin ends. What a library prints itself goes to stderr."""
    ask = {"langchain": langchain, "litellm": litellm, "llama_index": llama_index}[sys.argv[1]]
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            text, tokens, reason = ask(json.loads(line))
            answer: dict[str, object] = {"text": text, "tokens": tokens, "finish_reason": reason}
        except Exception as error:  # noqa: BLE001 - every library has an exception tree of its own, and all are reported
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
