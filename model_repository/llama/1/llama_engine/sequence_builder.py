"""Builds the sequences of requests: what follows from a request's parameters and the checkpoint's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llama_engine.api.generation_request import GenerationRequest
from llama_engine.sampling.guided import Guides
from llama_engine.sampling.row_processor import RowProcessor, row_processor
from llama_engine.sequence import PromptShare, RequestContext, Sequence
from llama_engine.text.stop_checker import StopChecker
from llama_engine.text.tokenizer import Vocabulary


@dataclass(frozen=True)
class SequenceBuilder:
    """Builds sequences of one engine. Thread-safe. guides: of the checkpoint's vocabulary and end tokens."""

    vocabulary: Vocabulary
    end_tokens: frozenset[int]
    guides: Guides
    device: torch.device
    stream_interval: int

    def build(
        self,
        request: GenerationRequest,
        context: RequestContext,
        share: PromptShare | None = None,
        template: RowProcessor | None = None,
    ) -> Sequence:
        """Return the sequence of a request, or of one of its choices; not ready if its guide takes time to start, or
        it is another choice than the first one, whose guides together would take time.

        Raises InvalidRequest for a guide that was refused before.

        share: as in `Sequence`. template: the processor of another choice of the request, which has not begun.
        """
        kind, text = request.guided_decoding_guide_type, request.guided_decoding_guide
        guide = self.guides.start_soon(kind, text) if kind and request.choice == 0 else None
        if template is None:
            processor = row_processor(request, self.vocabulary, self.end_tokens, self.device)
        else:
            processor = template.clone()
        if processor is not None and guide is not None:
            processor.follow_guide(guide)
        return Sequence(
            request,
            StopChecker(
                min_tokens=request.min_tokens,
                max_tokens=request.max_tokens,
                stop_words=request.stop_words,
                end_tokens=frozenset() if request.ignore_eos else self.end_tokens,
                stop_tokens=frozenset(request.stop_token_ids),
            ),
            processor,
            context.sink,
            context.name,
            context.stream,
            context.deadline,
            self.stream_interval,
            share,
            is_ready=not kind or guide is not None,
        )

    def start_guide(self, sequence: Sequence) -> None:
        """Start the guide of a sequence that is not ready. May block for seconds. Raises what `Guides.start` raises."""
        request = sequence.request
        assert sequence.processor is not None, "it has no guide"
        sequence.processor.follow_guide(
            self.guides.start(request.guided_decoding_guide_type, request.guided_decoding_guide)
        )
        sequence.is_ready = True
