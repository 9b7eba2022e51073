"""Clients of others: raw HTTP, Triton's own library, OpenAI's own library. Each asks once, without retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from triton_llama import SamplingParams
from triton_llama.status import read_config
from triton_local.repository import MODEL_NAME
from triton_supervisor.repository_api import UNARY
from tritonclient.utils import InferenceServerException

from perf.soak.stack import Stack
from perf.soak.tally import Given

TIMEOUT_S = 120.0
OUTPUTS = ("text_output", "finish_reason", "num_output_tokens")


class WrongAnswerError(Exception):
    """An answer that no client can use."""


FAULTS = (httpx.HTTPError, InferenceServerException, openai.OpenAIError, WrongAnswerError, OSError, TimeoutError)
"""What these clients raise."""


class Addresses(NamedTuple):
    """Where clients reach the server. http, grpc: host:port. openai: the endpoint's base URL.

    unary: the model that answers with one response; streams: whether `llama` streams.
    """

    http: str
    grpc: str
    openai: str
    served_name: str
    unary: str
    streams: bool


def addresses(stack: Stack) -> Addresses:
    """Return where clients reach the stack, and what the running config answers with."""
    server, endpoint = stack.server, stack.endpoint
    models = f"http://{server.http_url}/v2/models"
    config = httpx.get(f"{models}/{MODEL_NAME}/config", timeout=TIMEOUT_S).raise_for_status().json()
    unary = UNARY if httpx.get(f"{models}/{UNARY}/ready", timeout=TIMEOUT_S).is_success else MODEL_NAME
    streams = read_config(config).decoupled
    return Addresses(server.http_url, server.grpc_url, endpoint.url, endpoint.served_name, unary, streams)


async def raw(at: Addresses, prompt: str, asked: SamplingParams, streamed: bool = False) -> Given:
    """POST to /generate or /generate_stream, as curl does, on a connection of its own."""
    fields = {
        "text_input": prompt,
        "max_tokens": asked.max_tokens,
        "min_tokens": asked.min_tokens,
        "temperature": asked.temperature,
    }
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=False) as http:
        if not streamed:
            response = await http.post(f"http://{at.http}/v2/models/{at.unary}/generate", json=fields)
            return _joined([Given(*(response.raise_for_status().json()[name] for name in OUTPUTS))])
        url, chunks = f"http://{at.http}/v2/models/{MODEL_NAME}/generate_stream", []
        async with http.stream("POST", url, json={"stream": True, **fields}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    chunks.append(Given(*(chunk[name] for name in OUTPUTS)))
    return _joined(chunks)


TRITON = (tritonclient.http, tritonclient.http.aio, tritonclient.grpc, tritonclient.grpc.aio)
"""The forms of Triton's own library; without aio it blocks."""


async def infer(library: Any, at: Addresses, prompt: str, asked: SamplingParams) -> Given:  # noqa: ANN401 - a module
    """Infer with one of TRITON."""
    arrays = {
        "text_input": ("BYTES", np.array([[prompt.encode()]], np.object_)),
        "max_tokens": ("INT32", np.array([[asked.max_tokens]], np.int32)),
        "min_tokens": ("INT32", np.array([[asked.min_tokens]], np.int32)),
        "temperature": ("FP32", np.array([[asked.temperature]], np.float32)),
    }
    inputs = []
    grpc = library in (tritonclient.grpc, tritonclient.grpc.aio)
    for name, (datatype, array) in arrays.items():
        inputs.append((tritonclient.grpc if grpc else tritonclient.http).InferInput(name, [1, 1], datatype))
        inputs[-1].set_data_from_numpy(array)
    if library is tritonclient.http:
        client = library.InferenceServerClient(at.http, network_timeout=TIMEOUT_S)
    else:
        client = library.InferenceServerClient(at.grpc if grpc else at.http)
    limit = {"client_timeout": TIMEOUT_S} if grpc else {}
    if library in (tritonclient.http, tritonclient.grpc):
        with client:
            result = await asyncio.to_thread(client.infer, at.unary, inputs, **limit)
    else:
        async with client:
            result = await client.infer(at.unary, inputs, **limit)
    text, reason, tokens = (result.as_numpy(name)[0] for name in OUTPUTS)
    return Given(text.decode(), reason.decode(), int(tokens))


async def openai_completion(client: openai.AsyncOpenAI, name: str, prompt: str, asked: SamplingParams) -> Given:
    """Send a completion request with OpenAI's library."""
    answer = await client.completions.create(model=name, prompt=prompt, **_openai(asked))
    assert answer.usage is not None
    return Given(answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens)


async def openai_chat(
    client: openai.AsyncOpenAI,
    name: str,
    prompt: str,
    asked: SamplingParams,
    chunks: int | None = None,
    came: Callable[[], None] | None = None,
) -> Given | None:
    """Stream a chat with OpenAI's library; leave after that many chunks and return None, if the answer goes on.

    came: called with every chunk.
    """
    text, reason, tokens = "", "", 0
    stream = await client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": prompt}],
        stream=True,
        stream_options={"include_usage": True},
        **_openai(asked),
    )
    async with stream:
        async for chunk in stream:
            if came is not None:
                came()
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
            if chunks is not None and not reason and (chunks := chunks - 1) <= 0:
                return None
    if not reason or not tokens:
        raise WrongAnswerError(f"a chat's stream ended with finish_reason {reason!r} and {tokens} tokens")
    return Given(text, reason, tokens)


def _openai(asked: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "extra_body": {"min_tokens": asked.min_tokens},
    }


def _joined(chunks: Sequence[Given]) -> Given:
    if not chunks or not chunks[-1].finish_reason:
        raise WrongAnswerError(f"a stream ended after {len(chunks)} chunks without a finish_reason")
    text, tokens = "".join(one.text for one in chunks), sum(one.num_output_tokens for one in chunks)
    return Given(text, chunks[-1].finish_reason, tokens)
