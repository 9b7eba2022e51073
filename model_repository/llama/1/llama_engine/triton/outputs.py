"""The outputs that a response has only on request: token ids, log probabilities and times.

The JSON of log probabilities has the format of Triton's vLLM backend: a list with one object per token. The object maps
the ids of the token and of the most likely tokens to `logprob`, `rank` (1 is the most likely) and `decoded_token`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        # Keyed by the id() of the list of log probabilities: choices share the list of their prompt.
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

    def write_some(self, sequence: EngineSequence, max_tokens: int) -> bool:
        """Serialize at most `max_tokens` more tokens of a sequence; return whether all of its tokens are serialized."""
        request = sequence.request
        requested = [sequence.prompt_log_probs] if request.prompt_logprobs is not None else []
        requested += [sequence.log_probs] if request.num_logprobs is not None else []
        return all(len(self.write(log_probs, max_tokens)) == len(log_probs) for log_probs in requested)

    def of_prompt(self, sequence: EngineSequence) -> str:
        """Return the JSON list of a prompt's log probabilities; null if the request has no prompt_logprobs."""
        if sequence.request.prompt_logprobs is None:
            return "null"
        # The first token has no log probability.
        return f"[{', '.join(['null', *self.write(sequence.prompt_log_probs)])}]"

    def of_output(self, span: Span) -> str:
        """Return the JSON list of a span's log probabilities; null if the request has no num_logprobs."""
        if span.sequence.request.num_logprobs is None:
            return "null"
        return f"[{', '.join(self.write(span.sequence.log_probs)[span.first : span.last])}]"


def optional_outputs(spans: Sequence[Span], writer: LogProbsWriter, final: bool) -> dict[str, Output]:
    """Return the optional outputs that any request of the spans enables, by name, with one row per span.

    final: whether this is the last response of the sequences. Times are in the last response, log probabilities of the
    prompts in the first one.
    """
    requests = [span.sequence.request for span in spans]
    outputs: dict[str, Output] = {}
    if any(request.return_output_ids for request in requests):
        outputs["output_ids"] = _output_ids(spans)
        outputs["seed"] = np.array([request.seed for request in requests], dtype=np.uint64)
    if any(request.return_log_probs for request in requests):
        outputs["output_log_probs"] = _output_log_probs(spans)
        outputs["cum_log_probs"] = np.array([_cumulated(span) for span in spans], dtype=np.float32)
    if any(request.num_logprobs is not None for request in requests):
        outputs["logprobs"] = _strings(writer.of_output(span) for span in spans)
    if any(request.prompt_logprobs is not None for request in requests) and not any(span.first for span in spans):
        outputs["prompt_logprobs"] = _strings(writer.of_prompt(span.sequence) for span in spans)
    if final and any(request.return_perf_metrics for request in requests):
        outputs |= _perf_metrics([span.sequence for span in spans])
    return outputs


def _output_ids(spans: Sequence[Span]) -> NDArray[np.int32]:
    """Return token ids [spans, tokens of the longest span], -1 as padding and where they aren't requested."""
    values = np.full((len(spans), max(span.last - span.first for span in spans)), -1, dtype=np.int32)
    for row, span in zip(values, spans, strict=True):
        if span.sequence.request.return_output_ids:
            row[: span.last - span.first] = span.sequence.output_tokens[span.first : span.last]
    return values


def _output_log_probs(spans: Sequence[Span]) -> NDArray[np.float32]:
    """Return log probabilities [spans, tokens of the longest span], 0 as padding and where they aren't requested."""
    values = np.zeros((len(spans), max(span.last - span.first for span in spans)), dtype=np.float32)
    for row, span in zip(values, spans, strict=True):
        if span.sequence.request.return_log_probs:
            log_probs = [token.log_prob for token in span.sequence.log_probs[span.first : span.last]]
            row[: len(log_probs)] = log_probs
    return values


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
    # An f-string, because json.dumps takes 1.5 times as long.
    return f'"{token}": {{"logprob": {bounded!r}, "rank": {rank}, "decoded_token": {tokenizer.token_in_json(token)}}}'


def _perf_metrics(sequences: Sequence[EngineSequence]) -> dict[str, Output]:
    """Return the sequences' times in nanoseconds since 1970."""
    offset = time.time_ns() - time.monotonic_ns()
    times: Mapping[str, Callable[[EngineSequence], float]] = {
        "arrival_time_ns": lambda sequence: sequence.arrived_at,
        "first_scheduled_time_ns": lambda sequence: sequence.admitted_at,
        "first_token_time_ns": lambda sequence: sequence.first_token_at,
        # A sequence finishes with its last token.
        "last_token_time_ns": lambda sequence: sequence.finished_at,
    }
    return {
        name: np.array([offset + round(at(sequence) * 1e9) for sequence in sequences], dtype=np.int64)
        for name, at in times.items()
    }


def _strings(texts: Iterable[str]) -> Output:
    return np.array([text.encode() for text in texts], dtype=np.object_)
