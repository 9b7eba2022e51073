"""A request's fields as the model's inputs, and the model's errors with the fields' names."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from triton_llama.errors import TritonLlamaError
from triton_llama.sampling_params import INPUTS
from triton_llama.tensors import Tensor

from triton_llama_openai.errors import from_triton, prompt_too_long
from triton_llama_openai.guides.structured_output import Guide
from triton_llama_openai.protocol.prompts import Prompt
from triton_llama_openai.protocol.sampling import PASSTHROUGH_FIELDS, SamplingRequest
from triton_llama_openai.triton.merge import ChunkStream

if TYPE_CHECKING:
    from triton_llama_openai.served.served_model import ServedModel

_UP_TO_THE_CONTEXT = 1 << 20
"""max_tokens beyond any context: with truncate_max_tokens the model reduces it to what the context leaves."""


def inputs_of(
    request: SamplingRequest,
    prompt: Prompt,
    guide: Guide | None,
    model: ServedModel,
    stream_interval_ms: int,
    cache_salt: str | None,
) -> list[Tensor]:
    """Return the tensors of one prompt; fields without a value are left to the model's defaults.

    A request always has max_tokens and a seed, and a temperature unless the checkpoint has its own default.
    Every request is a stream with its tokens' ids, so that it can be resumed.
    """
    tensors = [*prompt_tensors(prompt, model), Tensor("stream", "BOOL", (True,))]
    values = {name: getattr(request, name) for name in PASSTHROUGH_FIELDS} | {
        "logit_bias": json.dumps(request.logit_bias) if request.logit_bias else None,
        "stop_words": request.stop_strings,
        "repetition_penalty": request.penalty,
        "num_logprobs": request.num_logprobs,
        "prompt_logprobs": request.num_prompt_logprobs,
        "stream_interval_ms": stream_interval_ms,
        "return_output_ids": True,
        "return_perf_metrics": request.timings or None,
        "cache_salt": cache_salt,
        "prediction": request.predicted_text,
    }
    if request.max_new_tokens is None:
        values |= {"max_tokens": request.DEFAULT_MAX_TOKENS or _UP_TO_THE_CONTEXT, "truncate_max_tokens": True}
    else:
        # The model generates at least one token; `Generation.stream` leaves out one that isn't wanted.
        values["max_tokens"] = max(request.max_new_tokens, 1)
    if request.temperature is None:
        values["temperature"] = model.default_temperature
    if request.top_k is not None:
        values["top_k"] = max(request.top_k, 0)
    # A resumed request must have the seed of the first try.
    values["seed"] = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    if guide is not None:
        values |= {"guided_decoding_guide_type": guide.kind, "guided_decoding_guide": guide.guide}
    for name, value in values.items():
        datatype, is_list = INPUTS[name]
        elements = (value,) if not is_list else tuple(value or ())
        if elements and value is not None:
            tensors.append(Tensor(name, "BYTES" if datatype == "STRING" else datatype, elements))
    return tensors


def prompt_tensors(prompt: Prompt, model: ServedModel) -> list[Tensor]:
    """Return the tensors of a prompt and of the model that computes it.

    They name the description by which the request was prepared, so that no other model runs it; beside an adapter's
    name goes its digest, for the same reason.
    """
    if isinstance(prompt, str):
        tensors = [Tensor("text_input", "BYTES", (prompt,))]
    else:
        tensors = [Tensor("input_ids", "INT32", tuple(prompt))]
    tensors.append(Tensor("description_digest", "BYTES", (model.digest,)))
    if model.adapter is not None:
        tensors.append(Tensor("lora_name", "BYTES", (model.adapter.name,)))
        tensors.append(Tensor("lora_digest", "BYTES", (model.adapter.digest,)))
    return tensors


def check_lengths(field: str, prompts: Sequence[Prompt], context: int) -> None:
    """Refuse tokens beyond the context before anything copies them; a text's length is the model's to check.

    Raises ApiError. field: the prompts' name in the request.
    """
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and len(prompt) >= context:
            raise prompt_too_long(field_of_prompt(field, number, len(prompts)), len(prompt), context)


def field_of_prompt(field: str, number: int, count: int) -> str:
    """Return the field of one of a request's `count` prompts."""
    return field if count == 1 else f"{field}[{number}]"


async def with_api_errors(stream: ChunkStream, fields: Mapping[str, str], number: int, count: int) -> ChunkStream:
    """Yield the chunks of one of a request's `count` prompts; raise the model's errors as ApiErrors.

    fields: the request's field for each input of the model.
    """
    prompt = {name: field_of_prompt(fields[name], number, count) for name in ("text_input", "input_ids")}
    try:
        async with aclosing(stream):
            async for chunks in stream:
                yield chunks
    except TritonLlamaError as error:
        raise from_triton(error, {**fields, **prompt}) from error
