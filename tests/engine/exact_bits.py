"""Compares the bits of every logit of INT8 sequences in random mixes with those of the sequence alone.

A program as well, because the instruction sets that PyTorch and the compiled kernels may use are read from the
environment at the start of a process: `python -m engine.exact_bits --mixes 50`.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from engine.engines import engine_of, load, spoil_cache
from engine.int8_layers import threads
from engine.prompts import random_request
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint
from llama_engine.sampling.sampler import Sampler
from llama_engine.sampling.sampling_state import SamplingFeatures
from llama_engine.sequence import Sequence

SLOTS = (1, 2, 5, 8, 32)
BUDGETS = (1, 7, 16, 40, 512)
"""Prompt tokens per prefill pass; in all but the last a prompt is cut."""

Logits = dict[Sequence, list[torch.Tensor]]


@contextmanager
def recording_logits() -> Iterator[Logits]:
    """Keep the logits of each token of each sequence, [vocabulary]."""
    sample, logits_of = Sampler.sample, Logits()

    def recorded(
        sampler: Sampler, logits: torch.Tensor, first: int, sequences: list[Sequence], features: SamplingFeatures
    ) -> torch.Tensor:
        for row, sequence in enumerate(sequences):
            logits_of.setdefault(sequence, []).append(logits[row].clone())
        return sample(sampler, logits, first, sequences, features)

    with patch.object(Sampler, "sample", recorded):
        yield logits_of


class Bits:
    """Sequences alone, and what has been compared with them. different: descriptions of what differed."""

    def __init__(self, checkpoint: Checkpoint, mixes: int, kv_cache_dtype: str = "auto") -> None:
        """Compare this many mixes."""
        self._checkpoint, self._kv_cache_dtype = checkpoint, kv_cache_dtype
        self._engines: dict[tuple[int, int], Engine] = {}
        self.mixes, self.rows, self.cancelled = mixes, 0, 0
        self.different: list[str] = []
        randomness = random.Random(16)
        requests = [random_request(checkpoint, randomness) for _ in range(min(48, 2 * mixes))]
        alone = self._engine(1, BUDGETS[-1])
        self._alone: dict[object, tuple[object, list[torch.Tensor]]] = {}
        for request in requests:
            sequence = alone.builder.build(request)
            logits, _ = self._run(alone, [sequence], random.Random(0), 0.0)
            self._alone[request] = sequence.result, logits[sequence]
        for seed in range(mixes):
            randomness = random.Random(seed)
            engine = self._engine(randomness.choice(SLOTS), randomness.choice(BUDGETS))
            sequences = [
                engine.builder.build(request) for request in randomness.choices(requests, k=randomness.randint(1, 10))
            ]
            # Mostly one: beside other tests, two threads wait for each other a scheduler slice at a time.
            with threads(2 if seed % 32 == 7 else 1):
                logits, cancelled = self._run(engine, sequences, randomness, 0.05)
            self.cancelled += len(cancelled)
            for sequence in sequences:
                self._compare(sequence, logits.get(sequence, []), sequence in cancelled, seed)

    def _engine(self, slots: int, budget: int) -> Engine:
        if (slots, budget) not in self._engines:
            engine = engine_of(self._checkpoint, slots, prefill_tokens=str(budget), kv_cache_dtype=self._kv_cache_dtype)
            spoil_cache(engine)
            self._engines[slots, budget] = engine
        return self._engines[slots, budget]

    def _run(
        self, engine: Engine, sequences: list[Sequence], randomness: random.Random, cancelling: float
    ) -> tuple[Logits, set[Sequence]]:
        """Run sequences that arrive, and with this probability a step are cancelled, at random."""
        waiting, inside, cancelled = deque(sequences), list[Sequence](), set[Sequence]()
        with recording_logits() as logits_of:
            while waiting or inside:
                while waiting and len(inside) < engine.slots and randomness.random() < 0.7:
                    inside.append(waiting.popleft())
                    engine.add(inside[-1])
                if inside and randomness.random() < cancelling:
                    gone = inside.pop(randomness.randrange(len(inside)))
                    engine.remove(gone)
                    cancelled.add(gone)
                finished = engine.step().finished
                inside = [sequence for sequence in inside if sequence not in finished]
        return logits_of, cancelled

    def _compare(self, sequence: Sequence, logits: list[torch.Tensor], cancelled: bool, seed: int) -> None:
        result, alone = self._alone[sequence.request]
        self.rows += len(logits)
        whole = cancelled or (sequence.result == result and len(logits) == len(alone))
        pairs = zip(logits, alone, strict=False)
        wrong = [step for step, pair in enumerate(pairs) if not torch.equal(*pair)]
        if wrong or not whole:
            self.different.append(f"mix {seed}: logits {wrong} of {sequence.request}, result {sequence.result}")

    def describe(self) -> str:
        """Return what was compared as one line."""
        product = self._checkpoint.info.product
        return f"{product}: {self.mixes} mixes, {self.rows} rows, {self.cancelled} cancelled"


def main() -> None:
    """Print what was compared; exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, required=True)
    parser.add_argument("--kernels", default="auto")
    options = parser.parse_args()
    checkpoint = replace(load("int8", kernels=options.kernels), max_model_len=128)
    bits = Bits(checkpoint, options.mixes)
    print(bits.describe())
    if bits.different:
        raise SystemExit("\n".join([f"{len(bits.different)} sequences differ", *bits.different[:5]]))


if __name__ == "__main__":
    main()
