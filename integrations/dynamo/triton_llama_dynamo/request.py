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
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Options of Dynamo that are inputs of the same name."""

_INPUTS = {"stream": ("BOOL", False)} | {
    name: ("BYTES" if datatype == "STRING" else datatype, is_list) for name, (datatype, is_list) in INPUTS.items()
}

_SALT_PREFIX = "dynamo-cache-salt:"
"""By which Dynamo's reader of KV events knows a salt among a block's `extra_keys`, and which it removes."""


def tensors_of(request: Mapping[str, Any], description: Description) -> list[Tensor]:
    """Return the inputs of a request; options without a value are left to the model's defaults.

    Raises:
        InvalidArgument: the prompt fills the context, or the request asks for several completions or a beam search.
    """
    prompt = token_ids_to_list(request["token_ids"])
    room = description.max_model_len - len(prompt)
    if room <= 0:
        raise InvalidArgument(f"the prompt has {len(prompt)} tokens; the context has {description.max_model_len}")
    values = _sampling(request, description) | _stopping(request.get("stop_conditions") or {}, room)
    values |= {"stream": True, "return_output_ids": True}
    values["num_logprobs"], values["prompt_logprobs"] = parse_logprob_options(request.get("output_options") or {})
    routing: Mapping[str, Any] = request.get("routing") or {}
    values["priority"] = -int(routing.get("priority") or 0)
    if routing.get("cache_salt"):
        values["cache_salt"] = f"{_SALT_PREFIX}{routing['cache_salt']}"
    tensors = [Tensor("input_ids", "INT32", tuple(prompt))]
    # Another model refuses it.
    tensors.append(Tensor("description_digest", "BYTES", (description.digest,)))
    for name, value in values.items():
        if value is not None:
            datatype, is_list = _INPUTS[name]
            tensors.append(Tensor(name, datatype, tuple(value) if is_list else (value,)))
    return tensors


def _sampling(request: Mapping[str, Any], description: Description) -> dict[str, Any]:
    options: Mapping[str, Any] = request.get("sampling_options") or {}
    if (options.get("n") or 1) > 1:
        # Dynamo's adapter ends a worker's stream at the first finish reason.
        raise InvalidArgument(f"n is {options['n']}; it must be 1")
    if options.get("use_beam_search"):
        raise InvalidArgument("use_beam_search is true, but there is no beam search")
    values = {name: options.get(name) for name in _SAMPLING}
    if values["temperature"] is None and "temperature" not in description.checkpoint_defaults:
        # OpenAI's default.
        values["temperature"] = 1.0
    if values["seed"] is not None:
        values["seed"] %= 2**64
    if values["top_k"] is not None:
        # -1 is off, too.
        values["top_k"] = max(values["top_k"], 0)
    return values | _guide(options.get("guided_decoding") or {})


def _stopping(options: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Return the inputs that end the text. room: tokens that the prompt leaves of the context."""
    values = {name: options.get(name) for name in ("max_tokens", "min_tokens", "ignore_eos")}
    if values["max_tokens"] is None:
        values["max_tokens"] = room
    ids = [*(options.get("stop_token_ids") or []), *(options.get("stop_token_ids_hidden") or [])]
    return values | {"stop_token_ids": ids or None}


def _guide(guide: Mapping[str, Any]) -> dict[str, str]:
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
