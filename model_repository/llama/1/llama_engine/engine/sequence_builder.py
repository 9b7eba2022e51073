"""Builds sequences from parsed requests: with stop checker, logits processor and shared prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from llama_engine.engine.sequence import PromptShare, RequestContext, Sequence, Status
from llama_engine.request.parser import GenerationRequest
from llama_engine.sampling.draw import choice_seed
from llama_engine.sampling.logits_processor import LogitsProcessor, logits_processor
from llama_engine.text.stop_checker import StopChecker
from llama_engine.text.tokenizer import Vocabulary


def choices_of(request: GenerationRequest) -> list[GenerationRequest]:
    """Return one request per completion, in order. The first has this request's seed, the others derived seeds."""
    return [request, *(replace(request, choice=at, seed=choice_seed(request.seed, at)) for at in range(1, request.n))]


@dataclass(frozen=True)
class SequenceBuilder:
    """Builds sequences for one engine. Thread-safe. Without a context, events of the sequences are discarded."""

    vocabulary: Vocabulary
    end_tokens: frozenset[int]
    device: torch.device
    stream_interval: int

    def build(self, request: GenerationRequest, context: RequestContext | None = None) -> Sequence:
        """Return the sequence of a request for one completion, or of one choice. Raises as `Sequence.resume`."""
        return self._build(request, self._processor(request), context or RequestContext())

    def choices(self, request: GenerationRequest, context: RequestContext | None = None) -> list[Sequence]:
        """Return one sequence for each of the request's n completions; they share the prompt."""
        if request.n == 1:
            return [self.build(request, context)]
        context, processor, share = context or RequestContext(), self._processor(request), PromptShare()
        return [
            self._build(choice, None if processor is None else processor.clone(), context, share)
            for choice in choices_of(request)
        ]

    def _processor(self, request: GenerationRequest) -> LogitsProcessor | None:
        return logits_processor(request, self.vocabulary, self.end_tokens, self.device)

    def _build(
        self,
        request: GenerationRequest,
        processor: LogitsProcessor | None,
        context: RequestContext,
        share: PromptShare | None = None,
    ) -> Sequence:
        stop_checker = StopChecker(
            min_tokens=request.min_tokens,
            max_tokens=request.max_tokens,
            stop_words=request.stop_words,
            end_tokens=frozenset() if request.ignore_eos else self.end_tokens,
            stop_tokens=frozenset(request.stop_token_ids),
        )
        guided = bool(request.guided_decoding_guide_type)
        sequence = Sequence(
            request,
            stop_checker,
            processor,
            context.sink,
            context.name,
            context.stream,
            context.deadline,
            self.stream_interval,
            share,
            [self.vocabulary.token_bytes[token] for token in request.resume_ids],
            Status.WAITING_FOR_GUIDE if guided else Status.WAITING,
        )
        if not guided:
            sequence.resume()
        return sequence
