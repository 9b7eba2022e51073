"""In INT8, tokens and logits of a sequence are the same bits alone, in any mix and cut of prompts, with any adapters.

In a mix, sequences with common prefixes and choices of one prompt arrive at random times; their prompts are cut; some
are cancelled; some passes fail; the KV cache may have so few pages that prefixes are evicted and sequences preempted.
With drafts, steps verify several tokens of a sequence, some of them wrong. With adapters, some requests have none.
Some requests are for the embedding of their prompt.
"""

import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from engine.cpu_kernels.models import random_adapter
from engine.engines import EMBEDDED, assert_consistent, engine_of, free_pages, load, needs_compiled_kernels, spoil_cache
from engine.guesses import guess_at_random
from engine.int8_layers import threads
from engine.prompts import random_request
from llama_engine.checkpoint.pooling import Pooling
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence
from llama_engine.engine.sequence_builder import choices_of
from llama_engine.errors import GenerationError
from llama_engine.model.loader import LoadedModel
from llama_engine.request.adapter_choice import Adapter
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.sampler import Sampler
from llama_engine.sampling.state import BatchIndices, SamplingFeatures

from models.quantized_checkpoints import write

SLOTS = (1, 2, 5, 8, 32)
BUDGETS = (1, 7, 16, 40, 512)
"""Prompt tokens per prefill pass; in all but the last a prompt is cut."""

POOLS = (None, 1, 1.25, 2)
"""Tokens in the KV cache's pages, relative to max_model_len; None is max_model_len for each slot."""

RANKS = (8, 3, 20)
"""The ranks of the adapters."""

Logits = dict[Sequence, dict[int, torch.Tensor]]


@contextmanager
def recording_logits() -> Iterator[Logits]:
    """Keep the logits of each token of each sequence, [vocabulary], by the token's number."""
    sample, logits_of = Sampler.sample, Logits()

    def recorded(
        sampler: Sampler,
        logits: torch.Tensor,
        indices: BatchIndices,
        sequences: list[Sequence],
        features: SamplingFeatures,
    ) -> torch.Tensor:
        for row, sequence in enumerate(sequences):
            logits_of.setdefault(sequence, {})[sequence.num_output_tokens] = logits[row].clone()
        return sample(sampler, logits, indices, sequences, features)

    with patch.object(Sampler, "sample", recorded):
        yield logits_of


@contextmanager
def failing_passes(engine: Engine, randomness: random.Random, share: float) -> Iterator[None]:
    """Let this share of passes, and of copies of pages, fail after they have run."""

    def faulty(part: object, name: str) -> object:
        run = getattr(part, name)

        def run_and_fail(*arguments: object, **options: object) -> object:
            result = run(*arguments, **options)
            if randomness.random() < share:
                raise RuntimeError(f"{name} failed, as the test wants")
            return result

        return run_and_fail

    with ExitStack() as stack:
        model = engine._model
        for part, name in ((model, "run_chunks"), (model, "decode"), (model.cache, "copy")):
            stack.enter_context(patch.object(part, name, faulty(part, name)))
        yield


class Bits:
    """Sequences alone, and what has been compared with them.

    different: descriptions of what differed. rows: compared logits. events: how often sequences were preempted, say.
    """

    def __init__(
        self,
        checkpoint: LoadedModel,
        mixes: int,
        kv_cache_dtype: str = "auto",
        drafts: bool = False,
        adapters: bool = False,
    ) -> None:
        """Compare this many mixes."""
        # Of the last hidden state where there are drafts, else of all of them.
        self._checkpoint = replace(checkpoint, pooling=Pooling("last" if drafts else "mean"))
        self._kv_cache_dtype, self._drafts = kv_cache_dtype, drafts
        self._weights = [
            random_adapter(checkpoint.architecture, rank, rank, (torch.float32, torch.bfloat16)[rank % 2])
            for rank in RANKS
            if adapters
        ]
        self._adapters = [Adapter(f"{index}", 0, each.digest, each.rank, index)
                          for index, each in enumerate(self._weights, 1)]  # fmt: skip
        self._engines: dict[tuple[int, int, float | None], Engine] = {}
        self.rows = 0
        self.events = Counter[str]()
        self.different: list[str] = []
        randomness = random.Random(18)
        # Drawn two or three times each, so that a sequence that has run alone is compared in more than one mix.
        requests = [random_request(checkpoint, randomness) for _ in range(min(48, mixes))]
        requests += [self._with_prefix(request, randomness) for request in requests]
        alone = self._engine_of(1, prefix_cache="off")
        self._alone: dict[object, tuple[object, list[torch.Tensor]]] = {}
        self._tokens: dict[object, list[int]] = {}
        for request in requests:
            for choice in choices_of(request):
                sequence = alone.builder.build(choice)
                logits = self._run(alone, [sequence], random.Random(0), 0.0)
                self._alone[choice] = sequence.result, list(logits.get(sequence, {}).values())
                self._tokens[choice] = sequence.output_tokens
        for seed in range(mixes):
            self._mix(seed, requests)
        for engine in self._engines.values():
            assert engine._pages.num_available == engine.plan.shape.pages

    def _with_prefix(self, request: GenerationRequest, randomness: random.Random) -> GenerationRequest:
        """Return the request with a common prefix, sometimes another salt, several choices, or for an embedding."""
        tokens = random.Random(5).choices(range(300, 900), k=self._checkpoint.max_model_len)
        prefix = tuple(tokens[randomness.choice((0, 0, 1)) : randomness.choice((16, 33, 64))])
        max_tokens = randomness.choice((request.max_tokens, 48))
        room = self._checkpoint.max_model_len - max_tokens - len(prefix)
        embeds = request.seed % 5 == 0
        return replace(
            request,
            prompt_tokens=prefix + request.prompt_tokens[:room],
            max_tokens=max_tokens,
            min_tokens=randomness.choice((0, max_tokens)),
            cache_salt=randomness.choice(("", "", "other")),
            n=randomness.choice((1, 1, 1 if embeds else 3)),
            return_embedding=embeds,
            adapter=randomness.choice((None, *self._adapters)) if self._adapters else None,
        )

    def _mix(self, seed: int, requests: list[GenerationRequest]) -> None:
        randomness = random.Random(seed)
        engine = self._engine(randomness.choice(SLOTS), randomness.choice(BUDGETS), randomness.choice(POOLS))
        chosen = randomness.choices(requests, k=randomness.randint(1, 10))
        sequences = [sequence for request in chosen for sequence in engine.builder.choices(request)]
        # Mostly one: beside other tests, two threads wait for each other a scheduler slice at a time.
        with threads(2 if seed % 32 == 7 else 1), ExitStack() as stack:
            if seed % 4 == 1:
                stack.enter_context(failing_passes(engine, randomness, 0.1))
            logits = self._run(engine, sequences, randomness, 0.05)
        for sequence in sequences:
            self._compare(sequence, list(logits.get(sequence, {}).values()), seed)

    def _engine(self, slots: int, budget: int, pool: float | None) -> Engine:
        key = slots, budget, pool
        if key not in self._engines:
            parameters = {"prefill_tokens": str(budget)}
            if pool is not None:
                parameters["kv_cache_tokens"] = str(int(pool * self._checkpoint.max_model_len))
            self._engines[key] = self._engine_of(slots, **parameters)
            spoil_cache(self._engines[key])
            if self._drafts:
                tokens, randomness = self._tokens, random.Random(len(self._engines))
                guess_at_random(self._engines[key], lambda sequence: tokens[sequence.request], randomness)
        return self._engines[key]

    def _engine_of(self, slots: int, **parameters: str) -> Engine:
        loras = {"max_loras": str(len(self._weights)), "max_lora_rank": str(max(RANKS))}
        engine = engine_of(self._checkpoint, slots, kv_cache_dtype=self._kv_cache_dtype, **loras, **parameters)
        for index, adapter in enumerate(self._weights, 1):
            engine._model.loras.load(index, adapter)
        return engine

    def _run(self, engine: Engine, sequences: list[Sequence], randomness: random.Random, cancelling: float) -> Logits:
        """Run sequences that arrive, and with this probability a step are cancelled, at random."""
        waiting, inside = deque(sequences), list[Sequence]()
        with recording_logits() as logits_of:
            while waiting or inside:
                while waiting and engine.can_admit(waiting[0]) and randomness.random() < 0.7:
                    inside.append(waiting.popleft())
                    engine.add(inside[-1])
                if inside and randomness.random() < cancelling:
                    engine.remove(inside.pop(randomness.randrange(len(inside))))
                    self.events["cancelled"] += 1
                if cancelling and randomness.random() < 0.1:
                    for page in free_pages(engine):
                        spoil_cache(engine, page)
                step = engine.step()
                assert_consistent(engine)
                inside = [sequence for sequence in inside if sequence not in step.finished]
                assert step.cache is not None
                self.events += {
                    "preempted": step.preempted,
                    "evicted": step.cache.evicted_pages,
                    "hits": step.cache.hit_tokens,
                    "guessed": sum(draft.accepted for draft in step.drafts),
                }
        return logits_of

    def _compare(self, sequence: Sequence, logits: list[torch.Tensor], seed: int) -> None:
        result, alone = self._alone[sequence.request]
        self.rows += len(logits)
        self.events["embedded"] += isinstance(sequence.result, Completion) and bool(sequence.result.embedding)
        self.events["adapted"] += sequence.request.adapter is not None
        failed = isinstance(sequence.result, GenerationError)
        self.events["failed"] += failed
        # A cancelled sequence has no result.
        cut = failed or sequence.result is None
        whole = cut or (sequence.result == result and len(logits) == len(alone))
        pairs = zip(logits, alone, strict=False)
        wrong = [step for step, pair in enumerate(pairs) if not torch.equal(*pair)]
        if wrong or not whole:
            self.different.append(f"mix {seed}: logits {wrong} of {sequence.request}, result {sequence.result}")


MIXES = int(os.environ.get("EXACT_BITS_MIXES", "10"))
"""Mixes of a case; hundreds after a change to kernels, scheduler or KV cache."""
EVENTS = {"cancelled", "preempted", "evicted", "hits", "failed", "embedded"}
"""Events that each case must contain, in 10 mixes or more."""


@pytest.mark.parametrize(
    ("cache", "terms", "instructions", "options"),
    [
        ("auto", "auto", "", set()),
        ("float32", "1", "", set()),
        ("int8", "2", "AVX2", {"guessed"}),
        ("auto", "auto", "", {"guessed", "adapted"}),
    ],
)
def test_tokens_have_the_same_bits_in_any_mix(
    cache: str, terms: str, instructions: str, options: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiled_kernels(instructions.lower() or None)
    if instructions:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", instructions)
    checkpoint = replace(load("int8", kv_cache_dtype=cache, int8_terms=terms), max_model_len=128)
    assert f"by compiled {instructions or 'AVX'}" in checkpoint.info.product
    bits = Bits(checkpoint, MIXES, kv_cache_dtype=cache, drafts="guessed" in options, adapters="adapted" in options)
    assert bits.different == []
    assert bits.rows > 15 * MIXES
    assert {event for event, count in bits.events.items() if count} >= EVENTS | options
    assert all(bits.events[event] > MIXES for event in options)


def test_adapters_on_4_bit_groups_have_the_same_bits_in_any_mix(tmp_path: Path) -> None:
    needs_compiled_kernels()
    folder = write(EMBEDDED, "gptq4-act-order", tmp_path / "gptq")
    checkpoint = replace(load("checkpoint", model=str(folder)), max_model_len=128)
    bits = Bits(checkpoint, MIXES, drafts=True, adapters=True)
    assert bits.different == []
    assert bits.events["adapted"] > MIXES
