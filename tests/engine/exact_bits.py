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
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from engine.engines import engine_of, load
from engine.prompts import random_request
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint
from llama_engine.sampling.sampler import Sampler
from llama_engine.sampling.sampling_state import SamplingFeatures
from llama_engine.sequence import Sequence

POOL = 48
"""Requests that the mixes choose from; each is computed alone once."""
SLOTS = (1, 2, 5, 8, 32)
BUDGETS = (1, 7, 16, 40, 512)


@contextmanager
def recording_logits(logits_of: dict[Sequence, list[torch.Tensor]]) -> Iterator[None]:
    """Append the logits of each sequence's tokens, [vocabulary], to its list."""
    sample = Sampler.sample

    def recorded(
        sampler: Sampler, logits: torch.Tensor, first: int, sequences: list[Sequence], features: SamplingFeatures
    ) -> torch.Tensor:
        for row, sequence in enumerate(sequences):
            logits_of.setdefault(sequence, []).append(logits[row].clone())
        return sample(sampler, logits, first, sequences, features)

    with patch.object(Sampler, "sample", recorded):
        yield


@dataclass
class Bits:
    """Sequences alone, and what has been compared with them.

    budgets: prompt tokens per prefill pass; in smaller ones a prompt is cut. tolerance: largest difference of logits,
    relative to the largest; 0 compares bits. different: descriptions of what differed.
    """

    checkpoint: Checkpoint
    budgets: tuple[int, ...] = BUDGETS
    tolerance: float = 0.0
    kv_cache_dtype: str = "auto"
    rows: int = 0
    cancelled: int = 0
    mixes: int = 0
    different: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        randomness = random.Random(16)
        self._engines = {
            (slots, budget): self._engine(slots, budget) for slots in SLOTS for budget in {*self.budgets, BUDGETS[-1]}
        }
        requests = [random_request(self.checkpoint, randomness) for _ in range(POOL)]
        self._alone = {request: self._run_alone(request) for request in requests}

    def _engine(self, slots: int, budget: int) -> Engine:
        return engine_of(self.checkpoint, slots, prefill_tokens=str(budget), kv_cache_dtype=self.kv_cache_dtype)

    def _run_alone(self, request: GenerationRequest) -> tuple[object, list[torch.Tensor]]:
        engine = self._engines[1, BUDGETS[-1]]
        sequence = engine.sequence(request)
        logits_of: dict[Sequence, list[torch.Tensor]] = {}
        with recording_logits(logits_of):
            engine.add(sequence)
            while engine.used_slots:
                engine.step()
        return sequence.result, logits_of[sequence]

    def compare_mix(self, seed: int) -> None:
        """Run a random mix: arrivals, neighbours, cancellations, cuts of the prompts, and one thread or two."""
        randomness = random.Random(seed)
        engine = self._engines[randomness.choice(SLOTS), randomness.choice(self.budgets)]
        requests = randomness.choices(list(self._alone), k=randomness.randint(1, 10))
        # Mostly one: beside other tests, two threads wait for each other a scheduler slice at a time.
        torch.set_num_threads(2 if randomness.random() < 0.15 else 1)
        sequences = [engine.sequence(request) for request in requests]
        waiting, inside = deque(sequences), list[Sequence]()
        cancelled: set[Sequence] = set()
        logits_of: dict[Sequence, list[torch.Tensor]] = {}
        with recording_logits(logits_of):
            while waiting or inside:
                while waiting and len(inside) < engine.slots and randomness.random() < 0.7:
                    inside.append(waiting.popleft())
                    engine.add(inside[-1])
                if inside and randomness.random() < 0.05:
                    gone = inside.pop(randomness.randrange(len(inside)))
                    engine.remove(gone)
                    cancelled.add(gone)
                finished = engine.step().finished
                inside = [sequence for sequence in inside if sequence not in finished]
        self.mixes += 1
        self.cancelled += len(cancelled)
        for sequence in sequences:
            self._compare(sequence, logits_of.get(sequence, []), sequence in cancelled, seed)

    def _compare(self, sequence: Sequence, logits: list[torch.Tensor], cancelled: bool, seed: int) -> None:
        result, alone = self._alone[sequence.request]
        self.rows += len(logits)
        whole = cancelled or (sequence.result == result and len(logits) == len(alone))
        pairs = zip(logits, alone, strict=False)
        wrong = [step for step, pair in enumerate(pairs) if not self._same(*pair)]
        if wrong or not whole:
            self.different.append(f"mix {seed}: logits {wrong} of {sequence.request}, result {sequence.result}")

    def _same(self, logits: torch.Tensor, alone: torch.Tensor) -> bool:
        if not self.tolerance:
            return torch.equal(logits, alone)
        return bool((logits - alone).abs().max() <= self.tolerance * alone.abs().max())


def compare(bits: Bits, mixes: int) -> Bits:
    """Compare this many mixes; the number of threads is as before afterwards."""
    threads = torch.get_num_threads()
    try:
        for seed in range(mixes):
            bits.compare_mix(seed)
    finally:
        torch.set_num_threads(threads)
    return bits


def main() -> None:
    """Print what was compared; exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, required=True)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--whole-prompts", action="store_true", help="cut no prompt")
    options = parser.parse_args()
    checkpoint = replace(load("int8", kernels=options.kernels), max_model_len=128)
    bits = compare(Bits(checkpoint, BUDGETS[-1:] if options.whole_prompts else BUDGETS), options.mixes)
    print(f"{checkpoint.info.product}: {bits.mixes} mixes, {bits.rows} rows, {bits.cancelled} cancelled")
    if bits.different:
        raise SystemExit("\n".join([f"{len(bits.different)} sequences differ", *bits.different[:5]]))


if __name__ == "__main__":
    main()
