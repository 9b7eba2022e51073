"""Builds sequences from parsed requests: with output text, logits processor and shared prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakSet

import torch

from llama_engine.engine.events import RequestContext
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.bias_and_masks import BadWords, LogitsProcessor
from llama_engine.sampling.draw import choice_seed
from llama_engine.text.output_text import OutputText
from llama_engine.text.tokenizer import Vocabulary


class PromptShare:
    """The prompt shared by the choices of one request: computed for one choice; the others take over its pages.

    Apart from the prompt, choices are independent sequences. The prompt is computed again for a choice that gets its
    slot after all other choices have finished.
    """

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        """Hidden state of the prompt's last token, [1, hidden]; None until the prompt has been computed."""
        # References are weak: the choices refer to this object, and a reference cycle would delay freeing them.
        self._with_prompt: WeakSet[Sequence] = WeakSet()

    def keep(self, hidden: torch.Tensor) -> None:
        """Store a copy of the hidden state of the prompt's last token, [1, hidden]. Can run out of device memory."""
        if self.hidden is None:
            # A view would keep the hidden states of a whole pass alive.
            self.hidden = hidden.clone()

    def add(self, sequence: Sequence) -> None:
        """Add a choice whose pages have the prompt."""
        self._with_prompt.add(sequence)

    def computed(self) -> Sequence | None:
        """Return a choice whose pages have the prompt; None if there is none."""
        has_prompt = (choice for choice in self._with_prompt if choice.num_computed >= choice.num_prompt_tokens)
        return next(has_prompt, None)


def choices_of(request: GenerationRequest) -> list[GenerationRequest]:
    """Return a request for each completion, in order: the first has this request's seed, the others derived ones."""
    return [request, *(replace(request, choice=at, seed=choice_seed(request.seed, at)) for at in range(1, request.n))]


@dataclass(frozen=True)
class SequenceBuilder:
    """Builds sequences for one engine. Thread-safe. Without a context, events of the sequences are discarded."""

    vocabulary: Vocabulary
    end_tokens: frozenset[int]
    """The checkpoint's end tokens."""
    device: torch.device
    stream_interval: int

    def build(self, request: GenerationRequest, context: RequestContext | None = None) -> Sequence:
        """Return the sequence of a request for one completion, or of one choice. Raises as `Sequence.resume`."""
        return self._build(request, self.processor(request), context or RequestContext())

    def choices(self, request: GenerationRequest, context: RequestContext | None = None) -> list[Sequence]:
        """Return one sequence for each of the request's n completions; they share the prompt."""
        if request.n == 1:
            return [self.build(request, context)]
        context, processor, share = context or RequestContext(), self.processor(request), PromptShare()
        return [
            self._build(choice, None if processor is None else processor.clone(), context, share)
            for choice in choices_of(request)
        ]

    def processor(self, request: GenerationRequest) -> LogitsProcessor | None:
        """Return the processor of a request, without its guide; None if the request needs none."""
        needed = (
            request.logit_bias
            or request.allowed_token_ids
            or request.bad_words
            or request.guided_decoding_guide_type
            # The sampler's common mask for min_tokens has the checkpoint's end tokens only.
            or (request.min_tokens and (request.stop_token_ids or request.ignore_eos))
        )
        if not needed:
            return None
        stops, ends = set(request.stop_token_ids), self.end_tokens
        return LogitsProcessor(
            len(self.vocabulary.token_bytes),
            self.device,
            logit_bias=request.logit_bias,
            allowed=request.allowed_token_ids,
            ends=stops if request.ignore_eos else stops | ends,
            stops=stops - ends,
            ignored=ends - stops if request.ignore_eos else (),
            bad_words=BadWords(request.bad_words, self.vocabulary, self.device) if request.bad_words else None,
        )

    def _build(
        self,
        request: GenerationRequest,
        processor: LogitsProcessor | None,
        context: RequestContext,
        share: PromptShare | None = None,
    ) -> Sequence:
        output = OutputText(
            min_tokens=request.min_tokens,
            max_tokens=request.max_tokens,
            stop_words=request.stop_words,
            end_tokens=frozenset() if request.ignore_eos else self.end_tokens,
            stop_tokens=frozenset(request.stop_token_ids),
        )
        guided = bool(request.guided_decoding_guide_type)
        sequence = Sequence(
            request,
            output,
            processor,
            context,
            self.stream_interval,
            share,
            [self.vocabulary.token_bytes[token] for token in request.resume_ids],
            Status.WAITING_FOR_GUIDE if guided else Status.WAITING,
        )
        if not guided:
            sequence.take_resume_ids()
        return sequence
