"""Clients of others: raw HTTP, Triton's own library, OpenAI's own library. Each asks once, without retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Addresses:
    """Where clients reach the server. http, grpc: host:port. openai: the endpoint's base URL, if there is one.

    unary: the model that answers with one response; streams: whether `llama` streams.
    """

    http: str
    grpc: str
    openai: str | None
    served_name: str
    unary: str
    streams: bool


def addresses(stack: Stack) -> Addresses:
    """Return where clients reach the stack, and what the running config answers with."""
    server, endpoint = stack.server, stack.endpoint
    models = f"http://{server.http_url}/v2/models"
    config = httpx.get(f"{models}/{MODEL_NAME}/config", timeout=TIMEOUT_S).raise_for_status().json()
    unary = httpx.get(f"{models}/{UNARY}/ready", timeout=TIMEOUT_S).is_success
    return Addresses(
        http=server.http_url,
        grpc=server.grpc_url,
        openai=None if endpoint is None else endpoint.url,
        served_name="" if endpoint is None else endpoint.served_name,
        unary=UNARY if unary else MODEL_NAME,
        streams=read_config(config).decoupled,
    )


Ask = Callable[[Addresses, str, SamplingParams], Awaitable[Given]]


def _inputs(prompt: str, asked: SamplingParams) -> dict[str, Any]:
    return {
        "text_input": prompt,
        "max_tokens": asked.max_tokens,
        "min_tokens": asked.min_tokens,
        "temperature": asked.temperature,
    }


async def raw_generate(at: Addresses, prompt: str, asked: SamplingParams) -> Given:
    """POST to /generate, as curl does, on a connection of its own."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=False) as http:
        url = f"http://{at.http}/v2/models/{at.unary}/generate"
        body = (await http.post(url, json=_inputs(prompt, asked))).raise_for_status().json()
    return Given(body["text_output"], body["finish_reason"], body["num_output_tokens"])


async def raw_stream(at: Addresses, prompt: str, asked: SamplingParams) -> Given:
    """POST to /generate_stream, as curl -N does."""
    joined: list[dict[str, Any]] = []
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=False) as http:
        url = f"http://{at.http}/v2/models/llama/generate_stream"
        async with http.stream("POST", url, json={"stream": True, **_inputs(prompt, asked)}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    joined.append(json.loads(line.removeprefix("data: ")))
    return _joined([(one["text_output"], one["finish_reason"], one["num_output_tokens"]) for one in joined])


async def tritonclient_http(at: Addresses, prompt: str, asked: SamplingParams) -> Given:
    """Infer with tritonclient.http, which blocks."""

    def infer() -> Given:
        with tritonclient.http.InferenceServerClient(at.http, network_timeout=TIMEOUT_S) as client:
            return _given(client.infer(at.unary, _tensors(tritonclient.http.InferInput, prompt, asked)))

    return await asyncio.to_thread(infer)


async def tritonclient_http_aio(at: Addresses, prompt: str, asked: SamplingParams) -> Given:
    """Infer with tritonclient.http.aio."""
    async with tritonclient.http.aio.InferenceServerClient(at.http) as client:
        return _given(await client.infer(at.unary, _tensors(tritonclient.http.InferInput, prompt, asked)))


async def tritonclient_grpc(at: Addresses, prompt: str, asked: SamplingParams) -> Given:
    """Infer with tritonclient.grpc, which blocks."""

    def infer() -> Given:
        with tritonclient.grpc.InferenceServerClient(at.grpc) as client:
            tensors = _tensors(tritonclient.grpc.InferInput, prompt, asked)
            return _given(client.infer(at.unary, tensors, client_timeout=TIMEOUT_S))

    return await asyncio.to_thread(infer)


async def tritonclient_grpc_aio(at: Addresses, prompt: str, asked: SamplingParams) -> Given:
    """Stream with tritonclient.grpc.aio; infer, where the config doesn't stream."""
    tensors = _tensors(tritonclient.grpc.InferInput, prompt, asked)
    async with tritonclient.grpc.aio.InferenceServerClient(at.grpc) as client:
        if not at.streams:
            return _given(await client.infer(at.unary, tensors, client_timeout=TIMEOUT_S))

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "llama", "inputs": tensors}

        chunks: list[Given] = []
        async for result, error in client.stream_infer(requests(), stream_timeout=TIMEOUT_S):
            if error is not None:
                raise error
            chunks.append(_given(result))
    return _joined([(one.text, one.finish_reason, one.num_output_tokens) for one in chunks])


TRITON: tuple[Ask, ...] = (tritonclient_http, tritonclient_http_aio, tritonclient_grpc, tritonclient_grpc_aio)


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


def _tensors(kind: Any, prompt: str, asked: SamplingParams) -> list[Any]:  # noqa: ANN401 - its two InferInput share no base
    arrays = {
        "text_input": ("BYTES", np.array([[prompt.encode()]], np.object_)),
        "max_tokens": ("INT32", np.array([[asked.max_tokens]], np.int32)),
        "min_tokens": ("INT32", np.array([[asked.min_tokens]], np.int32)),
        "temperature": ("FP32", np.array([[asked.temperature]], np.float32)),
    }
    tensors = []
    for name, (datatype, array) in arrays.items():
        tensor = kind(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def _given(result: Any) -> Given:  # noqa: ANN401 - tritonclient is not annotated
    text, reason, tokens = (result.as_numpy(name)[0] for name in OUTPUTS)
    return Given(text.decode(), reason.decode(), int(tokens))


def _joined(chunks: Sequence[tuple[str, str, int]]) -> Given:
    if not chunks or not chunks[-1][1]:
        raise WrongAnswerError(f"a stream ended after {len(chunks)} chunks without a finish_reason")
    return Given("".join(chunk[0] for chunk in chunks), chunks[-1][1], sum(chunk[2] for chunk in chunks))
