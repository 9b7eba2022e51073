"""A sequence: one request in the engine, from its arrival to its last chunk.

It has one status and one result, and neither is copied elsewhere. A request with several batch elements is several
sequences that share a response sink.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from llama_engine.engine.chunk_cutter import ChunkCutter
from llama_engine.engine.events import FAILURE, Completion, RequestContext, Result
from llama_engine.errors import GenerationError, InvalidRequest, RequestError
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.bias_and_masks import LogitsProcessor
from llama_engine.sampling.log_probs import TokenLogProbs
from llama_engine.text.output_text import OutputText

if TYPE_CHECKING:
    import torch

    from llama_engine.engine.drafts import Drafting
    from llama_engine.engine.sequence_builder import PromptShare
    from llama_engine.guides.matcher import GuideState


class Status(Enum):
    """The stages of a sequence, in order."""

    WAITING_FOR_GUIDE = "waiting for guide"
    """The sequence's guide is being compiled."""
    WAITING = "waiting"
    """The sequence has no slot yet."""
    PREFILL = "prefill"
    """The sequence occupies one of the engine's slots; it gets a KV slot and pages when its prefill begins.
    Its prompt, or after a preemption all of its tokens, are not yet in the KV cache."""
    DECODE = "decode"
    """The sequence is in the batch and gets a token in each step, with drafts several."""
    FINISHED = "finished"
    """The sequence has its result."""


@dataclass(eq=False)
class Sequence:
    """One request in the engine, or one choice of it. Times are on the monotonic clock, in seconds; NaN until known."""

    request: GenerationRequest
    """The prompt and the parameters."""
    output: OutputText
    """The generated text, and the conditions that end it."""
    processor: LogitsProcessor | None = None
    """The sequence's logits processor: bias, masks and guide; None if its request needs none."""
    context: RequestContext = field(default_factory=RequestContext)
    """What the sequence shares with the request's other ones."""
    stream_interval: InitVar[int] = 1
    """Tokens per chunk after the first one."""
    share: PromptShare | None = None
    """The prompt shared with the request's other choices; None for a single choice."""
    resumed_bytes: list[bytes] = field(default_factory=list, repr=False)
    """The bytes of each token of the request's `resume_ids`."""
    status: Status = Status.WAITING
    """The stage of the sequence."""
    guide: Future[GuideState] | None = None
    """The compilation of the sequence's guide; None until the scheduler starts it, and without a guide."""
    result: Result | None = None
    """The completion or the error; None until the sequence has finished."""
    kv_slot: int | None = None
    """Index into the page table, from its first prefill pass until the sequence is removed or preempted; else None."""
    pages: list[int] = field(default_factory=list, repr=False)
    """Pages of the KV cache, in order of position; those of a prefix can be shared with other sequences."""
    page_digests: list[bytes] = field(default_factory=list, repr=False)
    """Digests of the sequence's first full pages, as far as `PageManager` has needed them."""
    num_matchable_pages: int = 0
    """Number of full pages that other sequences can match."""
    num_computed: int = 0
    """Number of positions in the KV cache."""
    num_cached_prompt_tokens: int = 0
    """Number of prompt tokens that were in the KV cache when the sequence last got pages before its first token."""
    num_steps: int = 0
    """Number of decode steps that ran for the sequence."""
    num_accepted_draft_tokens: int = 0
    """Number of output tokens that a draft had predicted."""
    num_rejected_draft_tokens: int = 0
    """Number of drafts' tokens that were computed and were not the sequence's next ones."""
    drafting: Drafting | None = field(default=None, repr=False)
    """What drafts are made of; None until `Drafter` needs it."""
    output_tokens: list[int] = field(default_factory=list, repr=False)
    """The tokens generated so far, those that the request resumes included."""
    prompt_log_probs: list[TokenLogProbs] = field(default_factory=list, repr=False)
    """Log probabilities of the prompt's tokens, from the second to the last."""
    log_probs: list[TokenLogProbs] = field(default_factory=list, repr=False)
    """Log probabilities of the output tokens."""
    cum_log_probs: list[float] = field(default_factory=list, repr=False)
    """Cumulative sums of the output tokens' log probabilities, one per output token."""
    pooled: torch.Tensor | None = field(default=None, repr=False)
    """What `Pooler` has made of the hidden states so far, at the end the embedding, [hidden]; None for a completion."""
    next_log_probs: TokenLogProbs | None = None
    """Log probabilities of the sampled token that `append` takes next."""
    arrived_at: float = field(default_factory=time.monotonic)
    """Time of the sequence's creation, when its request was parsed."""
    admitted_at: float = math.nan
    """Time of admission to a slot."""
    first_token_at: float = math.nan
    """Time of the first output token."""
    finished_at: float = math.nan
    """Time of the result."""
    chunk_cutter: ChunkCutter = field(init=False, repr=False)
    """Cuts the text into chunks, for a client that streams."""
    _finishing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self, stream_interval: int) -> None:
        self.chunk_cutter = ChunkCutter(self.request, self.output, stream_interval)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return self.output.num_tokens

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and of tokens generated so far."""
        return self.num_prompt_tokens + len(self.output_tokens)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that are not in the KV cache yet."""
        return self.num_tokens - self.num_computed

    @property
    def has_sampled(self) -> bool:
        """Whether a token was generated here, besides those that the request brings."""
        return not math.isnan(self.first_token_at)

    @property
    def scored_from(self) -> int | None:
        """First position whose token gets its log probability from prefill; None if none does.

        The prompt's tokens do, and so do output tokens that the request resumes.
        """
        request = self.request
        if self.has_sampled:
            return None
        if request.prompt_logprobs is not None:
            return 1
        return self.num_prompt_tokens if request.resume_ids and request.needs_log_probs else None

    def num_log_probs(self, position: int) -> int:
        """Return how many likely tokens the log probabilities of a position's token have besides it."""
        is_output = position >= self.num_prompt_tokens
        return (self.request.num_logprobs if is_output else self.request.prompt_logprobs) or 0

    def tokens(self, first: int, last: int) -> tuple[int, ...]:
        """Return the tokens of the positions from `first` to before `last`, of prompt and output."""
        prompt, size = self.request.prompt_tokens, self.num_prompt_tokens
        if last <= size:
            return prompt[first:last]
        return (*prompt[first:], *self.output_tokens[max(first - size, 0) : last - size])

    def prompt_source(self) -> Sequence | None:
        """Return another choice of the request whose pages have the prompt; None if there is or needs to be none."""
        return None if self.share is None or self.output_tokens else self.share.computed()

    def follow_guide(self, guide: GuideState) -> None:
        """Constrain the output to a compiled guide: WAITING_FOR_GUIDE → WAITING."""
        assert self.processor is not None
        self.processor.follow_guide(guide)
        self.take_resume_ids()
        self.status = Status.WAITING

    def take_resume_ids(self) -> None:
        """Take the request's `resume_ids` as generated and their text as sent. Must be called once, after
        `follow_guide` where there is a guide.

        Raises InvalidRequest if the text ends within them or violates the guide.
        """
        tokens = self.request.resume_ids
        for count, (token, token_bytes) in enumerate(zip(tokens, self.resumed_bytes, strict=True), 1):
            self.output_tokens.append(token)
            finished, conforms = self._advance(token, token_bytes)
            if finished:
                bound = f"; it must be fewer: the text ends with token {count}"
                raise InvalidRequest("resume_ids is ", f"a list of {len(tokens)} tokens", bound)
            if not conforms:
                bound = f"; token {count} must conform to guided_decoding_guide"
                raise self._guide_problem or InvalidRequest("resume_ids is ", f"a list of {len(tokens)} tokens", bound)
        if tokens:
            self.chunk_cutter.skip()

    def admit(self) -> None:
        """Record the admission to a slot: WAITING → PREFILL."""
        self.status = Status.PREFILL
        self.admitted_at = time.monotonic()

    def preempt(self) -> None:
        """Record the loss of the pages: DECODE → PREFILL, unless a shutdown has finished the sequence meanwhile."""
        with self._finishing:
            if self.status is Status.DECODE:
                self.status = Status.PREFILL
        self.pooled = None
        if self.scored_from is not None:
            # The log probabilities of the tokens so far will be computed again.
            self.prompt_log_probs, self.log_probs, self.cum_log_probs = [], [], []

    def start_decoding(self) -> None:
        """Record the entry into the batch: PREFILL → DECODE, unless a shutdown has finished the sequence meanwhile."""
        with self._finishing:
            if self.status is Status.PREFILL:
                self.status = Status.DECODE

    def append(self, token: int, token_bytes: bytes) -> None:
        """Append the sampled token and its bytes; finish if the token ends the text or violates the guide."""
        self.output_tokens.append(token)
        finished, conforms = self._advance(token, token_bytes)
        if math.isnan(self.first_token_at):
            self.first_token_at = time.monotonic()
        if self.next_log_probs is not None:
            self._add_log_probs(self.next_log_probs)
            self.next_log_probs = None
        if finished:
            self.finish(self.completion())
        elif not conforms:
            count = self.num_output_tokens
            ruled_out = GenerationError(f"the text does not conform to the guide after {count} tokens")
            self.finish(self._guide_problem or ruled_out)

    def finish_embedding(self) -> None:
        """Finish with `pooled` as the embedding of the prompt."""
        assert self.pooled is not None
        embedding = tuple(self.pooled.tolist())
        self.finish(Completion("", "stop", self.num_prompt_tokens, 0, embedding=embedding))

    def add_scores(self, scores: list[TokenLogProbs]) -> None:
        """Store the log probabilities of the next tokens from `scored_from` on: the prompt's, then resumed ones."""
        scores_prompt = self.request.prompt_logprobs is not None
        missing = self.num_prompt_tokens - 1 - len(self.prompt_log_probs) if scores_prompt else 0
        self.prompt_log_probs += scores[:missing]
        if self.request.needs_log_probs:
            for log_probs in scores[missing:]:
                self._add_log_probs(log_probs)

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
        """Finish with GenerationError. exhausted: the sequence, computed alone, ran out of device memory."""
        message = f"the device's memory was exhausted by this request alone, of {self.num_prompt_tokens} prompt tokens"
        self.finish(GenerationError(message) if exhausted else FAILURE)

    def completion(self) -> Completion:
        """Return the text so far and the token counts as a result."""
        request, output = self.request, self.output
        return Completion(
            text=output.text if request.exclude_input_in_output else request.prompt + output.text,
            finish_reason=output.finish_reason,
            num_input_tokens=self.num_prompt_tokens,
            num_output_tokens=output.num_tokens,
            stop_reason=output.stop_reason,
            choice=request.choice,
        )

    def _advance(self, token: int, token_bytes: bytes) -> tuple[bool, bool]:
        """Append a token's bytes to the text; return whether it is finished, and whether the guide allows the token."""
        processor = self.processor
        conforms = processor is None or processor.append(token, token_bytes)
        finished = self.output.add(token, token_bytes, processor is not None and processor.is_complete)
        return finished, conforms

    def _add_log_probs(self, log_probs: TokenLogProbs) -> None:
        self.cum_log_probs.append(log_probs.log_prob + (self.cum_log_probs or [0.0])[-1])
        self.log_probs.append(log_probs)

    @property
    def _guide_problem(self) -> InvalidRequest | None:
        return None if self.processor is None else self.processor.problem
