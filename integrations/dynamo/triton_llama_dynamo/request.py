"""Dynamo's requests as the model's inputs, and the model's chunks as Dynamo's.

Stop strings, the chat template and the text are the frontend's; it sends token ids and gets token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dynamo.common.backend.logprobs import parse_logprob_options
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm.exceptions import InvalidArgument
from triton_llama.completion import Chunk, TokenLogprobs
from triton_llama.sampling_params import INPUTS
from triton_llama.tensors import Tensor
from triton_llama_openai.triton.description import Description

_SAMPLING = (
    *("temperature", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
"""Options of Dynamo that are inputs of the same name."""

_SALT_PREFIX = "dynamo-cache-salt:"
"""By which Dynamo's reader of KV events knows a salt among a block's `extra_keys`, and which it removes."""


def tensors_of(request: Mapping[str, Any], description: Description) -> list[Tensor]:
    """Return the inputs of a request; options without a value are left to the model's defaults.

    Raises:
        InvalidArgument: the prompt fills the context, or the request asks for several completions or a beam search.
    """
    prompt = token_ids_to_list(request["token_ids"])
    sampling: Mapping[str, Any] = request.get("sampling_options") or {}
    stopping: Mapping[str, Any] = request.get("stop_conditions") or {}
    routing: Mapping[str, Any] = request.get("routing") or {}
    if len(prompt) >= description.max_model_len:
        raise InvalidArgument(f"the prompt has {len(prompt)} tokens; the context has {description.max_model_len}")
    if (sampling.get("n") or 1) > 1:
        # Dynamo's adapter ends a worker's stream at the first finish reason.
        raise InvalidArgument(f"n is {sampling['n']}; it must be 1")
    if sampling.get("use_beam_search"):
        raise InvalidArgument("use_beam_search is true, but there is no beam search")
    values = {name: sampling.get(name) for name in _SAMPLING} | {name: stopping.get(name) for name in _STOPPING}
    if values["temperature"] is None and "temperature" not in description.checkpoint_defaults:
        # OpenAI's default.
        values["temperature"] = 1.0
    if values["max_tokens"] is None:
        values["max_tokens"] = description.max_model_len - len(prompt)
    if values["seed"] is not None:
        values["seed"] %= 2**64
    if sampling.get("top_k") is not None:
        # -1 is off, too.
        values["top_k"] = max(sampling["top_k"], 0)
    hidden = stopping.get("stop_token_ids_hidden") or []
    values["stop_token_ids"] = [*hidden, *(stopping.get("stop_token_ids") or [])] or None
    values["num_logprobs"], values["prompt_logprobs"] = parse_logprob_options(request.get("output_options") or {})
    values["priority"] = -int(routing.get("priority") or 0)
    if routing.get("cache_salt"):
        values["cache_salt"] = f"{_SALT_PREFIX}{routing['cache_salt']}"
    values |= _guide_of(sampling.get("guided_decoding") or {})
    values |= {"stream": True, "return_output_ids": True}
    tensors = [Tensor("input_ids", "INT32", tuple(prompt))]
    for name, value in values.items():
        if value is not None:
            datatype, is_list = ("BOOL", False) if name == "stream" else INPUTS[name]
            elements = tuple(value) if is_list else (value,)
            tensors.append(Tensor(name, "BYTES" if datatype == "STRING" else datatype, elements))
    return tensors


def _guide_of(guide: Mapping[str, Any]) -> dict[str, str]:
    """Return the inputs of a guide, of which Dynamo has validated that it has one field."""
    names = {"json": "json_schema", "regex": "regex", "grammar": "ebnf_grammar", "structural_tag": "structural_tag"}
    for name, kind in names.items():
        if guide.get(name) is not None:
            text = guide[name] if isinstance(guide[name], str) else json.dumps(guide[name])
            return {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}
    if guide.get("choice"):
        text = "|".join(f"(?:{re.escape(choice)})" for choice in guide["choice"])
        return {"guided_decoding_guide_type": "regex", "guided_decoding_guide": text}
    return {}


class Answer:
    """The chunks of one request as Dynamo's. num_logprobs: those asked for, None for no log probabilities."""

    def __init__(self, num_logprobs: int | None) -> None:
        self._num_logprobs = num_logprobs
        self._num_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def chunk(self, chunk: Chunk) -> dict[str, Any]:
        """Return Dynamo's form of a chunk; the last one has the finish reason and the token counts."""
        self._num_tokens += chunk.num_output_tokens
        self._prompt_logprobs = chunk.prompt_logprobs or self._prompt_logprobs
        result: dict[str, Any] = {"token_ids": list(chunk.output_ids), "index": 0}
        if self._num_logprobs is not None and chunk.logprobs:
            entries = [_entries(logprobs) for logprobs in chunk.logprobs]
            result["log_probs"] = [of_token[0]["logprob"] for of_token in entries]
            if self._num_logprobs:
                result["top_logprobs"] = entries
        if chunk.finish_reason:
            result["finish_reason"] = chunk.finish_reason
            result["completion_usage"] = {
                "prompt_tokens": chunk.num_input_tokens,
                "completion_tokens": self._num_tokens,
                "total_tokens": chunk.num_input_tokens + self._num_tokens,
                "prompt_tokens_details": {"cached_tokens": chunk.num_cached_tokens or 0},
            }
            if self._prompt_logprobs is not None:
                result["engine_data"] = {"prompt_logprobs": self._prompt_logprobs}
        return result


def _entries(logprobs: TokenLogprobs) -> list[dict[str, Any]]:
    """Return the log probabilities of one token's position, its own first."""
    return [
        {
            "rank": entry["rank"],
            "token_id": int(token),
            "token": entry["decoded_token"],
            "logprob": entry["logprob"],
            "bytes": entry.get("bytes") or list(str(entry["decoded_token"]).encode()),
        }
        for token, entry in logprobs.items()
    ]
