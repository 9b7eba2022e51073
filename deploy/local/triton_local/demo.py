"""`make demo`: a real Triton, 16 different prompts at once over HTTP and gRPC, their completions, and one chat answer.

Every figure is read back: the texts from the responses, the batch sizes from Triton's statistics, the steps from the
model's metrics, what was loaded from its log line. Exits with 1 if Triton doesn't start, if a prompt failed, if no
sequences were decoded together, if the weights aren't INT8, or if the chat has no answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Sequence

import tritonclient.http
from triton_llama import AsyncLlamaClient, Completion, SamplingParams, TritonLlamaError

from triton_local.errors import LauncherError
from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.server import LocalTriton

PROMPTS = (
    "Return a list of",
    "The with statement is used to",
    "This module provides",
    "A dictionary is",
    "If the file does not exist,",
    "Raise an exception if",
    "The for statement is used to",
    "This method is called when",
    "Convert a string to",
    "The import statement",
    "Generator functions",
    "Return True if the",
    "Class instances are",
    "The default value is",
    "Read at most size bytes",
    "An iterator is",
)
SAMPLING = SamplingParams(max_tokens=40, temperature=0.4, top_p=0.9, repetition_penalty=1.1, stop_words=("\n\n",))

# The embedded checkpoint is too small to gain from a second thread, and on a busy machine threads lose time waiting for
# each other at every small product.
_THREADS = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

QUESTION = "What does textwrap.wrap do?"

Outcome = Completion | TritonLlamaError


def main() -> int:
    """Run the demonstration; return the exit code."""
    # The demo serves the embedded checkpoint with the settings' defaults, whatever the shell sets for `make serve`.
    for name in [name for name in os.environ if name.startswith(("LLAMA_", "TRITON_"))]:
        del os.environ[name]
    print("starting Triton with the embedded checkpoint ...", flush=True)
    try:
        with LocalTriton(environment=_THREADS) as server:
            batches_before = _batches(server.http_url)
            started = time.perf_counter()
            outcomes = asyncio.run(_complete_all(server.http_url, server.grpc_url))
            seconds = time.perf_counter() - started
            batches = {
                size: count - batches_before.get(size, 0)
                for size, count in _batches(server.http_url).items()
                if count > batches_before.get(size, 0)
            }
            steps, tokens = _steps(server.metrics_url)
            loaded = _loaded(server.log_text())
            chat = _chat(server.grpc_url)
            # Every answer has been read; a drain would take five seconds.
            server.kill()
    except LauncherError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    _print_texts(outcomes)
    print(f"\n[OpenAI] {QUESTION} → {chat or 'no answer'}")
    tokens = sum(outcome.num_output_tokens for outcome in outcomes if isinstance(outcome, Completion))
    formed = ", ".join(f"{count} of size {size}" for size, count in sorted(batches.items()))
    print(f"\nbatches Triton handed over: {formed}")
    print(f"steps of the decode loop: {steps}, with {tokens / max(steps, 1):.1f} sequences on average")
    print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s on this machine")
    print(loaded)
    return _verdict(outcomes, tokens > steps, loaded, chat)


async def _complete_all(http_url: str, grpc_url: str) -> Sequence[Outcome]:
    """Send all prompts at once, every other one over gRPC."""
    async with AsyncLlamaClient(http_url) as http, AsyncLlamaClient(grpc_url, protocol="grpc") as grpc:
        calls = [
            (grpc if index % 2 else http).generate(prompt, SAMPLING, seed=index) for index, prompt in enumerate(PROMPTS)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    unexpected = [outcome for outcome in outcomes if not isinstance(outcome, Completion | TritonLlamaError)]
    if unexpected:
        raise unexpected[0]
    return [outcome for outcome in outcomes if isinstance(outcome, Completion | TritonLlamaError)]


def _chat(grpc_url: str) -> str:
    """Return a chat answer over OpenAI's protocol, from an endpoint in front of this server."""
    with OpenAIEndpoint("127.0.0.1", 0, grace=10) as endpoint:
        endpoint.start(grpc_url)
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": endpoint.served_name, "messages": messages, "max_tokens": 60, "temperature": 0}
        request = urllib.request.Request(f"{endpoint.url}/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            return " ".join(json.load(response)["choices"][0]["message"]["content"].split())


def _batches(http_url: str) -> dict[int, int]:
    """Return how often Triton has executed a batch of each size."""
    with tritonclient.http.InferenceServerClient(http_url) as client:
        statistics = client.get_inference_statistics("llama")["model_stats"][0]["batch_stats"]
    return {int(entry["batch_size"]): int(entry["compute_infer"]["count"]) for entry in statistics}


def _steps(metrics_url: str) -> tuple[int, int]:
    """Return the number of decode steps and the sum of their sequences, once the metrics count every prompt."""
    deadline = time.monotonic() + 10
    while True:
        with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=10) as response:
            metrics = response.read().decode()
        answered = re.findall(r"^llama_requests_total\{.*\} (\d+)", metrics, re.MULTILINE)
        if sum(map(int, answered)) >= len(PROMPTS) or time.monotonic() > deadline:
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


def _print_texts(outcomes: Sequence[Outcome]) -> None:
    for index, (prompt, outcome) in enumerate(zip(PROMPTS, outcomes, strict=True)):
        way = "gRPC" if index % 2 else "HTTP"
        if isinstance(outcome, Completion):
            text = " ".join(outcome.text.split())
            print(f"\n[{way}] {prompt} → {text}\n       ({outcome.num_output_tokens} tokens, {outcome.finish_reason})")
        else:
            print(f"\n[{way}] {prompt} → {type(outcome).__name__}: {outcome}")


def _verdict(outcomes: Sequence[Outcome], together: bool, loaded: str, chat: str) -> int:
    failures = []
    if failed := sum(not isinstance(outcome, Completion) for outcome in outcomes):
        failures.append(f"{failed} of {len(outcomes)} prompts failed")
    if not together:
        failures.append("no two sequences were decoded together")
    # Without compiled kernels they are dequantized.
    if " in int8" not in loaded and "INT8 weights dequantized" not in loaded:
        failures.append("the weights are not INT8")
    if not chat:
        failures.append("the chat has no answer")
    for failure in failures:
        print(f"demo: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
