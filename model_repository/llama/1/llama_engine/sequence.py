"""A sequence: one request in the engine, from its arrival to its last chunk.

It has one status and one result, and neither is copied elsewhere. A request of several rows is several sequences that
share a response sink.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from llama_engine.api.generation_request import GenerationRequest
from llama_engine.errors import GenerationError, RequestError
from llama_engine.events import FAILURE, Chunk, Completion, DiscardingSink, ResponseSink, Result
from llama_engine.sampling.log_probs import TokenLogProbs
from llama_engine.sampling.row_processor import RowProcessor
from llama_engine.text.stop_checker import StopChecker

if TYPE_CHECKING:
    from llama_engine.sampling.guide_matcher import GuideState


class Status(Enum):
    """A sequence's place on the way from the queue to its result."""

    WAITING_FOR_GUIDE = "waiting for guide"
    """The sequence's guide is being compiled."""
    WAITING = "waiting"
    """The sequence has no slot yet."""
    PREFILL = "prefill"
    """The sequence has a slot; its prompt is not yet completely in the KV cache."""
    DECODE = "decode"
    """The sequence gets one token per step."""
    FINISHED = "finished"
    """The sequence has its result."""


@dataclass(frozen=True)
class RequestContext:
    """The context of a request, shared by its sequences.

    sink: receives their events. name: the request's id in the log, one line. stream: whether the sink receives chunks,
    too. deadline: latest time to get a slot, on the monotonic clock.
    """

    sink: ResponseSink = field(default_factory=DiscardingSink)
    name: str = ""
    stream: bool = False
    deadline: float = math.inf


class PromptShare:
    """The prompt that the choices of one request share: computed for one choice, and copied by the others.

    Otherwise choices are independent sequences. A choice that gets its slot after all others have left theirs computes
    the prompt again.
    """

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        """Hidden state of the prompt's last token, [1, hidden]; None until the prompt has been computed."""
        # Weak: the choices refer to this, and without a cycle all are freed at once.
        self._cached: WeakSet[Sequence] = WeakSet()

    def keep(self, hidden: torch.Tensor) -> None:
        """Keep the hidden state of the prompt's last token, [1, hidden]. May exhaust the memory."""
        if self.hidden is None:
            # A copy: it may be a view of a whole pass.
            self.hidden = hidden.clone()

    def add(self, sequence: Sequence) -> None:
        """Add a choice whose KV slot has the prompt."""
        self._cached.add(sequence)

    def cached(self) -> Sequence | None:
        """Return a choice whose KV slot has the prompt; None if there is none."""
        return next((sequence for sequence in self._cached if sequence.kv_slot is not None), None)


@dataclass(eq=False)
class Sequence:
    """One request in the engine, or one choice of it. Times are monotonic, in seconds; NaN until they are reached."""

    request: GenerationRequest
    """The prompt and the parameters."""
    stop_checker: StopChecker
    """The text so far, and where it ends."""
    processor: RowProcessor | None = None
    """Bias, masks and guide of this sequence alone."""
    sink: ResponseSink = field(default_factory=DiscardingSink)
    """Takes its chunks and its result."""
    name: str = ""
    """The request's id in the log, one printable line."""
    stream: bool = False
    """Send chunks to the sink."""
    deadline: float = math.inf
    """Latest time to get a slot."""
    stream_interval: int = 1
    """Tokens per chunk after the first one."""
    share: PromptShare | None = None
    """The prompt that it shares with the other choices."""
    status: Status = Status.WAITING
    """Its place on the way from the queue to its result."""
    guide: Future[GuideState] | None = None
    """The guide that is compiled for it; None before the scheduler starts it, or without a guide."""
    result: Result | None = None
    """The completion or the error; None until it has finished."""
    kv_slot: int | None = None
    """Where its keys and values are cached, from prefill to its end."""
    num_cached: int = 0
    """Positions of the KV slot that hold its keys and values."""
    num_copied: int = 0
    """Cached positions that were copied from another choice of the request."""
    prompt_log_probs: list[TokenLogProbs] = field(default_factory=list, repr=False)
    """Log probabilities of the prompt's tokens, from the second to the last."""
    log_probs: list[TokenLogProbs] = field(default_factory=list, repr=False)
    """Log probabilities of the output tokens."""
    cum_log_probs: list[float] = field(default_factory=list, repr=False)
    """The sums of the output tokens' log probabilities, up to each."""
    next_log_probs: TokenLogProbs | None = None
    """Log probabilities of the sampled token that `append` takes next."""
    arrived_at: float = field(default_factory=time.monotonic)
    """When it was made of its request."""
    admitted_at: float = math.nan
    """When it got its slot."""
    first_token_at: float = math.nan
    """When its first token was appended."""
    finished_at: float = math.nan
    """When it got its result."""
    _num_chunked_tokens: int = 0
    _next_chunk_at: float = -math.inf
    _finishing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.stop_checker.num_tokens

    @property
    def num_uncached(self) -> int:
        """Prompt tokens that are not in the KV cache yet."""
        return max(self.num_prompt_tokens - self.num_cached, 0)

    def follow_guide(self, guide: GuideState) -> None:
        """Mask tokens by the guide: WAITING_FOR_GUIDE → WAITING."""
        assert self.processor is not None
        self.processor.follow_guide(guide)
        self.status = Status.WAITING

    def admit(self) -> None:
        """Enter the engine: WAITING → PREFILL."""
        self.status = Status.PREFILL
        self.admitted_at = time.monotonic()

    def start_decoding(self) -> None:
        """Enter the batch: PREFILL → DECODE, unless a shutdown has finished it meanwhile."""
        with self._finishing:
            if self.status is Status.PREFILL:
                self.status = Status.DECODE

    def append(self, token: int, token_bytes: bytes) -> None:
        """Take the next token and its bytes; finish if it is the last one."""
        processor = self.processor
        conforms = processor is None or processor.append(token, token_bytes)
        finished = self.stop_checker.add(token, token_bytes, processor is not None and processor.is_complete)
        if math.isnan(self.first_token_at):
            self.first_token_at = time.monotonic()
        if self.next_log_probs is not None:
            self.cum_log_probs.append(self.next_log_probs.log_prob + (self.cum_log_probs or [0.0])[-1])
            self.log_probs.append(self.next_log_probs)
            self.next_log_probs = None
        if finished:
            self.finish(self.completion())
        elif not conforms:
            count = self.num_output_tokens
            ruled_out = GenerationError(f"the text does not conform to the guide after {count} tokens")
            self.finish(ruled_out if processor is None or processor.problem is None else processor.problem)

    def finish(self, result: Result) -> None:
        """Set the result. An error replaces a completion; nothing replaces an error.

        Any thread may call it: a shutdown finishes sequences while a step that holds them hangs.
        """
        with self._finishing:
            if isinstance(self.result, RequestError) or (self.result is not None and isinstance(result, Completion)):
                return
            self.finished_at = time.monotonic()
            self.result = result
            self.status = Status.FINISHED

    def fail(self, exhausted: bool = False) -> None:
        """Finish with the error of a failed computation. exhausted: it took all of the device's memory by itself."""
        message = f"the device's memory was exhausted by this request alone, of {self.num_prompt_tokens} prompt tokens"
        self.finish(GenerationError(message) if exhausted else FAILURE)

    def next_chunk(self) -> Chunk | None:
        """Return the text that has become certain since the last chunk; None if none is due and more will come."""
        stop_checker = self.stop_checker
        pending = stop_checker.num_tokens - self._num_chunked_tokens
        # The first chunk has no interval to wait for: TTFT is what it would be without one.
        waits = self._num_chunked_tokens > 0 and not stop_checker.finish_reason
        if pending < (self.stream_interval if waits else 1) or (waits and time.monotonic() < self._next_chunk_at):
            return None
        text = stop_checker.next_delta()
        if not self._num_chunked_tokens and not self.request.exclude_input_in_output:
            text = self.request.prompt + text
        if not text and not stop_checker.finish_reason:
            return None
        chunk = Chunk(text, pending, self.request.choice)
        self._num_chunked_tokens = stop_checker.num_tokens
        if self.request.stream_interval_ms:
            self._next_chunk_at = time.monotonic() + self.request.stream_interval_ms / 1000
        return chunk

    def completion(self) -> Completion:
        """Return the text so far, and the counts."""
        request, stop_checker = self.request, self.stop_checker
        return Completion(
            text=stop_checker.text if request.exclude_input_in_output else request.prompt + stop_checker.text,
            finish_reason=stop_checker.finish_reason,
            num_input_tokens=self.num_prompt_tokens,
            num_output_tokens=stop_checker.num_tokens,
            stop_reason=stop_checker.stop_reason,
            choice=request.choice,
        )


def names_of(sequences: Iterable[Sequence]) -> str:
    """Return how the log names these sequences: one by its request's id, several by their number."""
    names = [sequence.name for sequence in sequences]
    return f"request {names[0]}" if len(names) == 1 and names[0] else f"{len(names)} sequences"
