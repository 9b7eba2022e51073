"""All that an engine gives for a sequence, and what it must give for one that is resumed."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from engine.engines import assert_consistent
from llama_engine.engine.engine import Engine
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.errors import RequestError
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.log_probs import TokenLogProbs


@dataclass
class Transcript:
    """One sequence's answer. result: as text, because errors have no equality. preempted: number of preemptions.

    chunks: texts of a stream, each with the number of tokens up to its end.
    """

    result: str
    tokens: list[int]
    log_probs: list[TokenLogProbs]
    cum_log_probs: list[float]
    prompt_log_probs: list[TokenLogProbs]
    chunks: list[tuple[int, str]] = field(default_factory=list)
    preempted: int = field(default=0, compare=False)

    def after(self, cut: int) -> Transcript:
        """Return the transcript with the chunks that end after `cut` tokens."""
        return replace(self, chunks=[(end, text) for end, text in self.chunks if end > cut])


def build(engine: Engine, request: GenerationRequest) -> Sequence:
    """Return the sequence of a request, with its guide."""
    sequence = engine.builder.build(request)
    if sequence.status is Status.WAITING_FOR_GUIDE:
        guide = engine.guides.start(request.guided_decoding_guide_type, request.guided_decoding_guide)
        sequence.follow_guide(guide.result())
    return sequence


def transcripts(engine: Engine, requests: Iterable[GenerationRequest]) -> list[Transcript]:
    """Run requests as the scheduler does, each as a stream."""
    waiting = deque(build(engine, request) for request in requests)
    sequences, chunks = list(waiting), {sequence: list[tuple[int, str]]() for sequence in waiting}
    preempted = Counter[Sequence]()
    while waiting or engine.num_sequences:
        while waiting and engine.can_admit(waiting[0]):
            engine.add(waiting.popleft())
        running = [*engine._batch.sequences, *engine._prefill.sequences]
        had_pages = [sequence for sequence in running if sequence.pages]
        step = engine.step()
        assert step.errors == 0
        assert_consistent(engine)
        preempted.update(sequence for sequence in had_pages if not (sequence.pages or sequence.result))
        for sequence in running:
            chunk = None if isinstance(sequence.result, RequestError) else sequence.chunk_cutter.next()
            if chunk is not None:
                before = chunks[sequence][-1][0] if chunks[sequence] else len(sequence.request.resume_ids)
                assert chunk.num_tokens == sequence.num_output_tokens - before
                chunks[sequence].append((sequence.num_output_tokens, chunk.text))
    return [
        Transcript(
            repr(sequence.result),
            sequence.output_tokens,
            sequence.log_probs,
            sequence.cum_log_probs,
            sequence.prompt_log_probs,
            chunks[sequence],
            preempted[sequence],
        )
        for sequence in sequences
    ]


def cuts(
    requests: Iterable[GenerationRequest], whole: Iterable[Transcript], randomness: random.Random
) -> list[tuple[GenerationRequest, Transcript]]:
    """Return each request resumed after every number of its tokens, with what it must give, in random order."""
    pairs = [
        (replace(request, resume_ids=tuple(of.tokens[:cut])), of.after(cut))
        for request, of in zip(requests, whole, strict=True)
        for cut in range(1, len(of.tokens))
    ]
    randomness.shuffle(pairs)
    return pairs
