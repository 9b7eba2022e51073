"""`make demo`: a real Triton and its OpenAI endpoint; 16 chats at once, a table by a schema, a tool call.

    python -m triton_local.demo [MODEL]

Every figure is read back: the batch sizes from Triton's statistics, the steps from the model's metrics, what was loaded
from its log line. Exits with 1 if Triton doesn't start, if a request failed, if no sequences were decoded together, or
if the weights aren't INT8.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import time
import urllib.request
from dataclasses import dataclass

import httpx
import tritonclient.http

from triton_local.errors import LauncherError
from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.server import LocalTriton

QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is the capital of Germany?",
    "What is the capital of Canada?",
    "How many days are in a week?",
    "What is the first month of the year?",
    "What is 2 + 2?",
    "What is the opposite of big?",
    "What is the plural of mouse?",
    "What instrument has 88 keys?",
    "Which ocean lies between Europe and America?",
    "Who was the first person to walk on the moon?",
    "What is the name of our galaxy?",
    "What does HTTP stand for?",
    "Name three fruits.",
    "Name three primary colors.",
)

TABLE_REQUEST = (
    "Alice is 30 and lives in Paris. Bob is 25 and lives in Rome. Carol is 41 and lives in Oslo. "
    "List the people as JSON."
)
_COLUMNS = {
    "name": {"type": "string", "maxLength": 20},
    "age": {"type": "integer", "maximum": 150},
    "city": {"type": "string", "maxLength": 20},
}
_ROW = {"type": "object", "properties": _COLUMNS, "required": [*_COLUMNS], "additionalProperties": False}
_TABLE = {"type": "array", "items": _ROW, "minItems": 3, "maxItems": 3}
_TABLE_FORMAT = {"type": "json_schema", "json_schema": {"name": "people", "schema": _TABLE, "strict": True}}

TOOL_REQUEST = "What is the weather in Paris, in celsius?"
_ARGUMENTS = {
    "city": {"type": "string", "maxLength": 20},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
}
_PARAMETERS = {"type": "object", "properties": _ARGUMENTS, "required": [*_ARGUMENTS], "additionalProperties": False}
_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": _PARAMETERS}}
_TOOL_CHOICE = {"type": "function", "function": {"name": "get_weather"}}

_TOKENS = 48


@dataclass(frozen=True)
class Answer:
    """A chat's answer: text, a call of a tool, or why it failed."""

    text: str
    tokens: int = 0
    failed: bool = False


def main() -> int:
    """Run the demonstration; return the exit code."""
    model = next(iter(sys.argv[1:]), None)
    # The settings' defaults apply, whatever the shell sets for `make serve`.
    for name in [name for name in os.environ if name.startswith(("LLAMA_", "TRITON_"))]:
        del os.environ[name]
    os.environ["TRITON_LLAMA_OPENAI_LOG_REQUESTS"] = "none"
    print("starting Triton ...", flush=True)
    try:
        with LocalTriton(model=model, ready_timeout=600) as server:
            with OpenAIEndpoint("127.0.0.1", 0, grace=10) as endpoint:
                endpoint.start(server.grpc_address)
                failures = asyncio.run(_show(server, endpoint))
            # Every answer has been read; a drain would take five seconds.
            server.kill()
    except LauncherError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    for failure in failures:
        print(f"demo: {failure}", file=sys.stderr)
    print(f"\nserve it until Ctrl-C: make serve{f' MODEL={shlex.quote(model)}' if model else ''}")
    return 1 if failures else 0


async def _show(server: LocalTriton, endpoint: OpenAIEndpoint) -> list[str]:
    """Send the requests, print what comes back, and return what is wrong with it."""
    batches_before = _batches(server.http_address)
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=300, trust_env=False) as client:
        started = time.perf_counter()
        chats = await asyncio.gather(*(_ask(client, endpoint.served_name, question) for question in QUESTIONS))
        seconds = time.perf_counter() - started
        steps, sequences = _steps(server.metrics_address)
        grown = {size: count - batches_before.get(size, 0) for size, count in _batches(server.http_address).items()}
        table = await _ask(client, endpoint.served_name, TABLE_REQUEST, max_tokens=200, response_format=_TABLE_FORMAT)
        call = await _ask(client, endpoint.served_name, TOOL_REQUEST, tools=[_TOOL], tool_choice=_TOOL_CHOICE)
    loaded = _loaded(server.log_text())

    print(f"\n{endpoint.served_name}, {len(chats)} chats at once, at most {_TOKENS} tokens each:\n")
    for question, chat in zip(QUESTIONS, chats, strict=True):
        print(f"  {question:<46} {chat.text}")
    print(f"\nJSON by a schema: {TABLE_REQUEST}\n\n  {table.text}")
    print(f"\na tool call: {TOOL_REQUEST}\n\n  {call.text}")
    tokens = sum(chat.tokens for chat in chats)
    formed = ", ".join(f"{count} of size {size}" for size, count in sorted(grown.items()) if count)
    print(f"\nthe chats' batches, as Triton formed them: {formed}")
    print(f"their decode steps: {steps}, with {sequences / max(steps, 1):.1f} sequences on average")
    print(f"their {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s on this machine")
    print(loaded)

    failures = []
    if failed := sum(answer.failed for answer in (*chats, table, call)):
        failures.append(f"{failed} of {len(chats) + 2} requests failed")
    if sequences <= steps:
        failures.append("no two sequences were decoded together")
    # Without compiled kernels they are dequantized.
    if " in int8" not in loaded and "INT8 weights dequantized" not in loaded:
        failures.append("the weights are not INT8")
    return failures


async def _ask(client: httpx.AsyncClient, model: str, question: str, **fields: object) -> Answer:
    """Send a chat of one message."""
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": _TOKENS, "temperature": 0, **fields}
    response = await client.post("chat/completions", json=body)
    answer = response.json()
    if response.is_error:
        return Answer(f"HTTP {response.status_code}: {answer['error']['message']}", failed=True)
    choice = answer["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    text = "; ".join(f"{call['name']}({call['arguments']})" for call in calls) or choice["message"]["content"] or ""
    cut = " ..." if choice["finish_reason"] == "length" else ""
    return Answer(" ".join(text.split()) + cut, answer["usage"]["completion_tokens"])


def _batches(http_address: str) -> dict[int, int]:
    """Return how often Triton has executed a batch of each size."""
    with tritonclient.http.InferenceServerClient(http_address) as client:
        statistics = client.get_inference_statistics("llama")["model_stats"][0]["batch_stats"]
    return {int(entry["batch_size"]): int(entry["compute_infer"]["count"]) for entry in statistics}


def _steps(metrics_address: str) -> tuple[int, int]:
    """Return the number of decode steps and the sum of their sequences, once the metrics count every chat."""
    deadline = time.monotonic() + 10
    while True:
        with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as response:
            metrics = response.read().decode()
        answered = re.findall(r"^llama_requests_total\{.*\} (\d+)", metrics, re.MULTILINE)
        if sum(map(int, answered)) >= len(QUESTIONS) or time.monotonic() > deadline:
            break
        # The model's metrics are up to 0.2 s old.
        time.sleep(0.05)
    count = re.search(r"^llama_step_sequences_count\{.*\} (\d+)", metrics, re.MULTILINE)
    total = re.search(r"^llama_step_sequences_sum\{.*\} (\d+)", metrics, re.MULTILINE)
    return (int(count[1]), int(total[1])) if count and total else (0, 0)


def _loaded(log: str) -> str:
    """Return the model's log line about what it loaded."""
    line = re.search(r"llama: (loaded .*?)\"?$", log, re.MULTILINE)
    return line[1] if line else "the log doesn't say what was loaded"


if __name__ == "__main__":
    sys.exit(main())
