"""The outputs of a response as Triton tensors, those of every response and those that a request asks for.

Tensors have one dimension, with one value per completion, because TensorRT-LLM's clients read `output[0]`. Four have
two dimensions: `sequence_index`, `output_ids`, `output_log_probs` and `embedding`.

The JSON of log probabilities has the format of Triton's vLLM backend: a list with one object per token. The object maps
the ids of the token and of the most likely tokens to `logprob`, `rank` (1 is the most likely) and `decoded_token`; an
object also has `bytes` where they are not the text's: of a part of a character, and none of a special token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence as EngineSequence
from llama_engine.sampling.log_probs import TokenLogProbs
from llama_engine.text.tokenizer import Tokenizer

MIN_LOG_PROB = -9999.0
"""Lower limit of a log probability in JSON, which has no minus infinity; the same value as in vLLM."""


class Span(NamedTuple):
    """The output tokens [first, last) of a sequence that one response covers."""

    sequence: EngineSequence
    first: int
    last: int


Output = NDArray[Any]


class LogProbsWriter:
    """Serializes the log probabilities of one response as JSON, incrementally, each token once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Keys are the id() of the list of log probabilities: choices share the list of their prompt.
        self._written: dict[int, list[str]] = {}

    def write(self, log_probs: Sequence[TokenLogProbs], max_tokens: int | None = None) -> list[str]:
        """Serialize at most `max_tokens` more tokens, None for all; return the JSON objects of all tokens so far.

        Thousands of tokens with 20 alternatives each take 0.1 s, so callers limit `max_tokens`.
        """
        written = self._written.setdefault(id(log_probs), [])
        last = None if max_tokens is None else len(written) + max_tokens
        for token in log_probs[len(written) : last]:
            written.append(_entries(token, self._tokenizer))
            # Release the GIL for the engine's thread.
            time.sleep(0)
        return written

    def serialize_up_to(self, sequence: EngineSequence, max_tokens: int) -> bool:
        """Serialize at most `max_tokens` more tokens of a sequence; return whether all of its tokens are serialized."""
        request = sequence.request
        requested = [sequence.prompt_log_probs] if request.prompt_logprobs is not None else []
        requested += [sequence.log_probs] if request.num_logprobs is not None else []
        return all(len(self.write(log_probs, max_tokens)) == len(log_probs) for log_probs in requested)

    def prompt_json(self, sequence: EngineSequence) -> str:
        """Return the JSON list of a prompt's log probabilities; null if the request has no prompt_logprobs."""
        if sequence.request.prompt_logprobs is None:
            return "null"
        # The first token has no log probability.
        return f"[{', '.join(['null', *self.write(sequence.prompt_log_probs)])}]"

    def output_json(self, span: Span) -> str:
        """Return the JSON list of a span's log probabilities; null if the request has no num_logprobs."""
        if span.sequence.request.num_logprobs is None:
            return "null"
        return f"[{', '.join(self.write(span.sequence.log_probs)[span.first : span.last])}]"


def optional_outputs(spans: Sequence[Span], writer: LogProbsWriter, final: bool) -> list[pb_utils.Tensor]:
    """Return the optional outputs that any request of the spans enables, with one element per span.

    final: whether this is the last response of the sequences. Times are in the last response, log probabilities of the
    prompts in the first one.
    """
    requests = [span.sequence.request for span in spans]
    outputs: dict[str, Output] = {}
    if any(request.return_output_ids for request in requests):
        outputs["output_ids"] = _output_ids(spans)
    if any(request.return_log_probs for request in requests):
        outputs["output_log_probs"] = _output_log_probs(spans)
        outputs["cum_log_probs"] = np.array([_cumulated(span) for span in spans], dtype=np.float32)
    if any(request.num_logprobs is not None for request in requests):
        outputs["logprobs"] = _texts(writer.output_json(span) for span in spans)
    if any(request.prompt_logprobs is not None for request in requests) and not any(span.first for span in spans):
        outputs["prompt_logprobs"] = _texts(writer.prompt_json(span.sequence) for span in spans)
    if any(request.return_embedding for request in requests):
        outputs["embedding"] = _embeddings([span.sequence for span in spans])
    if final and any(request.return_perf_metrics for request in requests):
        outputs |= _perf_metrics([span.sequence for span in spans])
    tensors = [pb_utils.Tensor(name, values) for name, values in outputs.items()]
    return [*tensors, _seeds(*[request.seed for request in requests])] if "output_ids" in outputs else tensors


def _output_ids(spans: Sequence[Span]) -> NDArray[np.int32]:
    """Return token ids [spans, tokens of the longest span], -1 as padding and where they aren't requested."""
    values = np.full((len(spans), max(span.last - span.first for span in spans)), -1, dtype=np.int32)
    for target, span in zip(values, spans, strict=True):
        if span.sequence.request.return_output_ids:
            target[: span.last - span.first] = span.sequence.output_tokens[span.first : span.last]
    return values


def _output_log_probs(spans: Sequence[Span]) -> NDArray[np.float32]:
    """Return log probabilities [spans, tokens of the longest span], 0 as padding and where they aren't requested."""
    values = np.zeros((len(spans), max(span.last - span.first for span in spans)), dtype=np.float32)
    for target, span in zip(values, spans, strict=True):
        if span.sequence.request.return_log_probs:
            log_probs = [token.log_prob for token in span.sequence.log_probs[span.first : span.last]]
            target[: len(log_probs)] = log_probs
    return values


def _embeddings(sequences: Sequence[EngineSequence]) -> NDArray[np.float32]:
    """Return embeddings [sequences, hidden], 0 where none is requested."""
    embeddings = [each.result.embedding for each in sequences if isinstance(each.result, Completion)]
    none = (0.0,) * max(map(len, embeddings))
    return np.array([embedding or none for embedding in embeddings], dtype=np.float32)


def _cumulated(span: Span) -> float:
    """Return the sum of log probabilities from a sequence's first output token to the end of the span."""
    enabled = span.sequence.request.return_log_probs and span.last > 0
    return span.sequence.cum_log_probs[span.last - 1] if enabled else 0.0


def _entries(log_probs: TokenLogProbs, tokenizer: Tokenizer) -> str:
    """Return the JSON object of one position: the token itself first, then the most likely tokens, each once."""
    entries = [_entry(log_probs.token, log_probs.log_prob, log_probs.rank, tokenizer)]
    rank, previous = 0, float("inf")
    for place, (token, log_prob) in enumerate(log_probs.top, 1):
        # Equally likely tokens share a rank.
        rank = rank if log_prob == previous else place
        previous = log_prob
        if token != log_probs.token:
            entries.append(_entry(token, log_prob, rank, tokenizer))
    return f"{{{', '.join(entries)}}}"


def _entry(token: int, log_prob: float, rank: int, tokenizer: Tokenizer) -> str:
    # Not max(): NaN must become MIN_LOG_PROB, too.
    bounded = log_prob if log_prob > MIN_LOG_PROB else MIN_LOG_PROB
    # An f-string is used because json.dumps takes 1.5 times as long.
    return f'"{token}": {{"logprob": {bounded!r}, "rank": {rank}, {tokenizer.token_in_json(token)}}}'


def _perf_metrics(sequences: Sequence[EngineSequence]) -> dict[str, Output]:
    """Return the sequences' times in nanoseconds since 1970."""
    offset = time.time_ns() - time.monotonic_ns()
    times: Mapping[str, Callable[[EngineSequence], float]] = {
        "arrival_time_ns": lambda sequence: sequence.arrived_at,
        "first_scheduled_time_ns": lambda sequence: sequence.admitted_at,
        # An embedding has no token, only the time of its end.
        "first_token_time_ns": lambda sequence: (
            sequence.first_token_at if sequence.has_sampled else sequence.finished_at
        ),
        # A sequence finishes with its last token.
        "last_token_time_ns": lambda sequence: sequence.finished_at,
    }
    return {
        name: np.array([offset + round(at(sequence) * 1e9) for sequence in sequences], dtype=np.int64)
        for name, at in times.items()
    }


def _texts(texts: Iterable[str]) -> Output:
    return np.array([text.encode() for text in texts], dtype=np.object_)


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
        _counts("num_accepted_draft_tokens", [sequence.num_accepted_draft_tokens for sequence in sequences]),
        _counts("num_rejected_draft_tokens", [sequence.num_rejected_draft_tokens for sequence in sequences]),
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
        _single("finish_reason", "" if completion is None else completion.finish_reason),
        _single("num_input_tokens", sequence.num_prompt_tokens),
        _single("num_output_tokens", num_output_tokens),
    ]
    if completion is not None:
        tensors += [
            _strings("stop_reason", [completion.stop_reason]),
            _single("num_cached_tokens", sequence.num_cached_prompt_tokens),
            _single("num_accepted_draft_tokens", sequence.num_accepted_draft_tokens),
            _single("num_rejected_draft_tokens", sequence.num_rejected_draft_tokens),
        ]
    return tensors


# Cached tensors are written to Triton's shared memory once. Only the dispatcher's thread uses the caches, and then
# `finalize`, after that thread has ended.
@lru_cache(maxsize=256)
def _single(name: str, value: int | str) -> pb_utils.Tensor:
    return _strings(name, [value]) if isinstance(value, str) else _counts(name, [value])


@lru_cache
def choice_tensor(choice: int) -> pb_utils.Tensor:
    """Return the tensor with the index of a chunk's completion, [1, 1], the shape that TensorRT-LLM's clients read."""
    return pb_utils.Tensor("sequence_index", np.array([[choice]], dtype=np.int32))


@lru_cache
def _seeds(*seeds: int) -> pb_utils.Tensor:
    return pb_utils.Tensor("seed", np.array(seeds, dtype=np.uint64))


def release_tensors() -> None:
    """Clear the caches of tensors, which must not outlive Triton's shared memory."""
    _single.cache_clear()
    choice_tensor.cache_clear()
    _seeds.cache_clear()


def _strings(name: str, values: Sequence[str]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array([value.encode() for value in values], dtype=np.object_))


def _counts(name: str, values: Sequence[int]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array(values, dtype=np.int32))
