"""Encodes responses as Triton tensors of one dimension, with one value per completion.

The dimension is a single one because TensorRT-LLM's clients read `output[0]`. Three outputs have two dimensions:
`sequence_index`, `output_ids` and `output_log_probs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import triton_python_backend_utils as pb_utils

from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence as EngineSequence
from llama_engine.triton.outputs import LogProbsWriter, Span, optional_outputs


def completion_tensors(sequences: Sequence[EngineSequence]) -> list[pb_utils.Tensor]:
    """Return the output tensors of a response with complete texts, of sequences without an error."""
    completions = [sequence.result for sequence in sequences if isinstance(sequence.result, Completion)]
    return [
        _strings("text_output", [completion.text for completion in completions]),
        _strings("finish_reason", [completion.finish_reason for completion in completions]),
        _strings("stop_reason", [completion.stop_reason for completion in completions]),
        _counts("num_input_tokens", [completion.num_input_tokens for completion in completions]),
        _counts("num_output_tokens", [completion.num_output_tokens for completion in completions]),
        _counts("num_cached_tokens", [sequence.num_cached_prompt_tokens for sequence in sequences]),
    ]


def text_tensor(text: str) -> pb_utils.Tensor:
    """Return the output tensor of a text that isn't a completion."""
    return _strings("text_output", [text])


def chunk_tensors(
    sequence: EngineSequence, text: str, num_output_tokens: int, completion: Completion | None
) -> list[pb_utils.Tensor]:
    """Return the output tensors of a chunk. completion: result of the sequence in its last chunk, else None."""
    tensors = [
        _strings("text_output", [text]),
        _reason("" if completion is None else completion.finish_reason),
        _count("num_input_tokens", sequence.num_prompt_tokens),
        _count("num_output_tokens", num_output_tokens),
    ]
    if completion is not None:
        tensors.append(_strings("stop_reason", [completion.stop_reason]))
        tensors.append(_count("num_cached_tokens", sequence.num_cached_prompt_tokens))
    return tensors


def optional_tensors(spans: Sequence[Span], writer: LogProbsWriter, final: bool) -> list[pb_utils.Tensor]:
    """Return the tensors of `optional_outputs`, with the same arguments."""
    return [pb_utils.Tensor(name, values) for name, values in optional_outputs(spans, writer, final).items()]


# Cached tensors are written to Triton's shared memory once. Only the dispatcher's thread uses the caches, and then
# `finalize`, after that thread has ended.
@lru_cache(maxsize=256)
def _count(name: str, value: int) -> pb_utils.Tensor:
    return _counts(name, [value])


@lru_cache
def choice_tensor(choice: int) -> pb_utils.Tensor:
    """Return the tensor with the index of a chunk's completion, [1, 1], the shape that TensorRT-LLM's clients read."""
    return pb_utils.Tensor("sequence_index", np.array([[choice]], dtype=np.int32))


@lru_cache
def _reason(value: str) -> pb_utils.Tensor:
    return _strings("finish_reason", [value])


def release_tensors() -> None:
    """Clear the caches of tensors, which must not outlive Triton's shared memory."""
    _count.cache_clear()
    choice_tensor.cache_clear()
    _reason.cache_clear()


def _strings(name: str, values: Sequence[str]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array([value.encode() for value in values], dtype=np.object_))


def _counts(name: str, values: Sequence[int]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32))
