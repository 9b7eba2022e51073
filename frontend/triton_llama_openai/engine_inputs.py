"""A request's fields as the model's inputs. docs/api.md has their meanings and bounds; the model checks them again."""

from __future__ import annotations

import json
from collections.abc import Sequence

from triton_llama.tensors import Tensor, Value

from triton_llama_openai.protocol import SamplingRequest
from triton_llama_openai.structured_output import Guide

MAX_MAX_TOKENS = 1 << 20
"""Stands for what the context leaves: with truncate_max_tokens the model cuts it to the room."""


def engine_fields(request: SamplingRequest, guide: Guide | None) -> dict[str, str]:
    """Return the request's field for each input of the model, for the model's errors."""
    fields = dict(request.ENGINE_FIELDS)
    if guide is not None:
        fields |= {"guided_decoding_guide": guide.field, "guided_decoding_guide_type": guide.field}
    return fields


def engine_inputs(
    request: SamplingRequest,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None,
    guide: Guide | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    stream_interval_ms: int,
) -> list[Tensor]:
    """Return the tensors of one prompt.

    max_tokens: None generates up to the end of the context. logprobs, prompt_logprobs: alternatives of each token, None
    for no log probabilities at all.
    """
    tensors = [_tensor("text_input", "BYTES", prompt)] if isinstance(prompt, str) else [_ids("input_ids", prompt)]
    inputs = [
        ("stream", "BOOL", request.streamed),
        ("stream_interval_ms", "INT32", stream_interval_ms if request.streamed else None),
        ("max_tokens", "INT32", MAX_MAX_TOKENS if max_tokens is None else max_tokens),
        ("truncate_max_tokens", "BOOL", True if max_tokens is None else request.truncate_max_tokens),
        ("n", "INT32", request.n),
        ("min_tokens", "INT32", request.min_tokens),
        ("temperature", "FP32", request.temperature),
        ("top_k", "INT32", None if request.top_k is None else max(request.top_k, 0)),
        ("top_p", "FP32", request.top_p),
        ("min_p", "FP32", request.min_p),
        ("repetition_penalty", "FP32", request.repetition_penalty),
        ("frequency_penalty", "FP32", request.frequency_penalty),
        ("presence_penalty", "FP32", request.presence_penalty),
        ("seed", "UINT64", None if request.seed is None else request.seed % 2**64),
        ("logit_bias", "BYTES", json.dumps(request.logit_bias) if request.logit_bias else None),
        ("ignore_eos", "BOOL", request.ignore_eos),
        ("priority", "INT32", request.priority),
        ("num_logprobs", "INT32", logprobs),
        ("prompt_logprobs", "INT32", prompt_logprobs),
        ("guided_decoding_guide_type", "BYTES", None if guide is None else guide.kind),
        ("guided_decoding_guide", "BYTES", None if guide is None else guide.guide),
        # For the cached tokens of usage; a stream without usage does without.
        ("return_perf_metrics", "BOOL", True if request.includes_usage or not request.streamed else None),
    ]
    tensors += [_tensor(name, datatype, value) for name, datatype, value in inputs if value is not None]
    if request.stop_strings:
        tensors.append(Tensor("stop_words", "BYTES", request.stop_strings))
    if request.bad_words:
        tensors.append(Tensor("bad_words", "BYTES", tuple(request.bad_words)))
    if request.stop_token_ids:
        tensors.append(_ids("stop_token_ids", request.stop_token_ids))
    if request.allowed_token_ids:
        tensors.append(_ids("allowed_token_ids", request.allowed_token_ids))
    return tensors


def _tensor(name: str, datatype: str, value: Value) -> Tensor:
    return Tensor(name, datatype, (value,))


def _ids(name: str, ids: Sequence[int]) -> Tensor:
    return Tensor(name, "INT32", tuple(ids))
