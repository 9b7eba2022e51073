"""A response's outputs, the same for HTTP and gRPC, as chunks and completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from triton_llama.completion import Chunk, Completion, Times
from triton_llama.errors import ServerError

_ALWAYS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")

_TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")

OUTPUT_NAMES = (*_ALWAYS, "num_cached_tokens", "num_accepted_draft_tokens", "num_rejected_draft_tokens", *_TIMES)
"""The outputs that the clients read: the first four of every response, the others of those that have them."""

EMBEDDING_OUTPUT_NAMES = (*OUTPUT_NAMES, "embedding")


def read_chunks(outputs: Mapping[str, Sequence[object]], choices: range) -> list[Chunk]:
    """Return a response's chunks: one of a stream has one choice's, any other all choices'.

    outputs: values by name. choices: the indices of the request's choices.

    Raises:
        ServerError: an output is missing or isn't what the contract says.
    """
    missing = [name for name in _ALWAYS if name not in outputs]
    if missing:
        raise ServerError(f"the server's answer lacks the output {missing[0]}")
    rows = range(len(outputs["text_output"]))
    try:
        indices = [_integer_of(outputs, "sequence_index", row) if "sequence_index" in outputs else row for row in rows]
        if not all(0 <= index < len(choices) for index in indices):
            raise ServerError(f"the server answered about choices {indices} of {len(choices)}")
        return [_chunk(outputs, row, choices[indices[row]]) for row in rows]
    except (IndexError, ValueError) as error:
        raise ServerError(f"the server's answer violates the contract: {error}") from error


def _chunk(outputs: Mapping[str, Sequence[object]], row: int, index: int) -> Chunk:
    # [rows, tokens], with -1 beyond a shorter row's end.
    ids = outputs.get("output_ids", ())
    width = len(ids) // len(outputs["text_output"])
    own_ids = [token for token in ids[row * width : (row + 1) * width] if isinstance(token, int)]
    numbers = outputs.get("embedding", ())
    size = len(numbers) // len(outputs["text_output"])
    embedding = np.array(numbers[row * size : (row + 1) * size], dtype=np.float32) if size else None
    logprobs, prompt_logprobs = (_string_of(outputs, name, row) for name in ("logprobs", "prompt_logprobs"))
    return Chunk(
        text=_string_of(outputs, "text_output", row),
        finish_reason=_string_of(outputs, "finish_reason", row),
        num_input_tokens=_integer_of(outputs, "num_input_tokens", row),
        num_output_tokens=_integer_of(outputs, "num_output_tokens", row),
        num_cached_tokens=_optional_integer_of(outputs, "num_cached_tokens", row),
        num_accepted_draft_tokens=_optional_integer_of(outputs, "num_accepted_draft_tokens", row),
        num_rejected_draft_tokens=_optional_integer_of(outputs, "num_rejected_draft_tokens", row),
        index=index,
        stop_reason=_string_of(outputs, "stop_reason", row),
        logprobs=json.loads(logprobs) if logprobs else [],
        prompt_logprobs=json.loads(prompt_logprobs) if prompt_logprobs else None,
        output_ids=tuple(token for token in own_ids if token >= 0),
        seed=_optional_integer_of(outputs, "seed", row),
        embedding=embedding,
        times=Times(*(_integer_of(outputs, name, row) for name in _TIMES)) if outputs.keys() >= {*_TIMES} else None,
    )


def _string_of(outputs: Mapping[str, Sequence[object]], name: str, row: int) -> str:
    value = outputs[name][row] if name in outputs else ""
    if not isinstance(value, str):
        raise ServerError(f"the server's output {name} is {value!r}, must be a string")
    return value


def _integer_of(outputs: Mapping[str, Sequence[object]], name: str, row: int) -> int:
    value = outputs[name][row]
    if not isinstance(value, int):
        raise ServerError(f"the server's output {name} is {value!r}, must be an integer")
    return value


def _optional_integer_of(outputs: Mapping[str, Sequence[object]], name: str, row: int) -> int | None:
    return _integer_of(outputs, name, row) if name in outputs else None


def read_chunk(outputs: Mapping[str, Sequence[object]]) -> Chunk:
    """Return the only chunk of a response; raises as `read_chunks`."""
    chunks = read_chunks(outputs, range(1))
    if len(chunks) != 1:
        raise ServerError(f"the server's answer has {len(chunks)} texts, must have one")
    return chunks[0]


def read_completion(outputs: Mapping[str, Sequence[object]], request_id: str, seed: int) -> Completion:
    """Return the only response to a request, which was sent with this id and seed; raises as `read_chunks`."""
    return Completion.of(read_chunk(outputs), request_id, seed)
