"""The command that the launcher prints, for a first request to the OpenAI endpoint."""

import json
import shlex

from triton_supervisor.triton import Address, AnswerError, exchange

_MODELS_S = 5.0
"""Timeout of the endpoint's list of models."""


def example_command(address: str, model: str) -> str:
    """Return a command that asks the endpoint at HOST:PORT, as a shell takes it: for a chat, or else an embedding."""
    path: str
    body: dict[str, object]
    question = "What is the capital of France?"
    if _embeds_alone(address):
        path, body = "embeddings", {"model": model, "input": question}
    else:
        messages = [{"role": "user", "content": question}]
        path, body = "chat/completions", {"model": model, "messages": messages, "max_tokens": 60, "temperature": 0}
    return f"curl -s http://{address}/v1/{path} -d {shlex.quote(json.dumps(body))}"


def _embeds_alone(address: str) -> bool:
    """Return whether the model serves embeddings alone; False where the list of models needs an API key."""
    try:
        answer = exchange(Address.parse(address), "GET", "/v1/models", _MODELS_S)
    except AnswerError:
        # The caller's loop reports an endpoint that has ended.
        return False
    return answer.status == 200 and [model["tasks"] for model in json.loads(answer.body)["data"]][:1] == [["embed"]]
