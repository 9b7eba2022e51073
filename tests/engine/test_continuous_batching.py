"""Sequences that are added and removed between any two steps: tokens, order, and the work of each step."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from engine.engines import alone, engine_of
from engine.requests import request_of
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine, StepResult
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Sequence, Status


def _random_request(checkpoint: Checkpoint, size: int, randomness: random.Random) -> GenerationRequest:
    request = request_of(checkpoint, randomness.getrandbits(32), size, randomness.randint(2, 8))
    return replace(
        request,
        min_tokens=randomness.choice((0, request.max_tokens)),
        temperature=randomness.choice((0.0, 0.75)),
        repetition_penalty=randomness.choice((1.0, 1.5)),
        frequency_penalty=randomness.choice((0.0, 1.0)),
        bad_words=randomness.choice(((), (b"e",))),
    )


@dataclass
class _Checked:
    """An engine that checks each of its steps. added, started: sequences, in order of arrival and of first tokens."""

    engine: Engine
    budget: int
    decoding: set[Sequence] = field(default_factory=set)
    inside: list[Sequence] = field(default_factory=list)
    added: list[Sequence] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    removed: set[Sequence] = field(default_factory=set)
    removals: Counter[str] = field(default_factory=Counter)

    def add(self, request: GenerationRequest) -> Sequence:
        sequence = self.engine.sequence(request)
        self.engine.add(sequence)
        self.inside.append(sequence)
        self.added.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        state = "decoding" if sequence in self.decoding else "partly cached" if sequence.num_cached else "waiting"
        self.removals[state] += 1
        used = self.engine.used_slots
        self.engine.remove(sequence)
        assert self.engine.used_slots == used - 1
        self.inside.remove(sequence)
        self.decoding.discard(sequence)
        self.removed.add(sequence)

    def step(self) -> StepResult:
        step = self.engine.step()
        assert step.errors == 0
        assert step.prefill_tokens <= self.budget
        assert step.decoded == len(self.decoding)
        # While prompts wait, each step computes some of them.
        assert step.prefill_tokens or len(self.inside) == len(self.decoding)
        first = [one for one in self.inside if one.num_output_tokens and one not in self.decoding]
        assert all(sequence.num_output_tokens == 1 for sequence in first)
        assert step.sampled == len(self.decoding) + len(first)
        self.started += first
        self.decoding |= set(first)
        for sequence in step.finished:
            assert sequence.status is Status.FINISHED
            self.decoding.remove(sequence)
            self.inside.remove(sequence)
        assert self.engine.used_slots == len(self.inside)
        return step


@pytest.mark.parametrize(("slots", "budget"), [(1, 9), (2, 16), (4, 40), (8, 32)])
def test_removed_sequences_change_neither_the_others_nor_their_order(fp32: Checkpoint, slots: int, budget: int) -> None:
    randomness = random.Random(slots)
    pool = [_random_request(fp32, size, randomness) for size in (3, 8, 8, 20, 70, 70)]
    expected = dict(zip(pool, alone(fp32, pool), strict=True))
    checked = _Checked(engine_of(fp32, slots, prefill_tokens=str(budget)), budget)
    for _ in range(90):
        while checked.engine.used_slots < slots and randomness.random() < 0.7:
            checked.add(randomness.choice(pool))
        if checked.inside and randomness.random() < 0.15:
            partial = [one for one in checked.inside if one.num_cached and one not in checked.decoding]
            checked.remove(randomness.choice(partial or checked.inside))
        checked.step()
    while checked.inside:
        checked.step()
    for sequence in checked.added:
        assert sequence.result == (None if sequence in checked.removed else expected[sequence.request])
    assert checked.started == [one for one in checked.added if one not in checked.removed or one in checked.started]
    assert checked.removals["partly cached"]
    assert checked.removals["decoding"]
    assert checked.removals["waiting"] or slots == 1


def test_running_sequences_get_a_token_in_every_step_of_a_long_prefill(fp32: Checkpoint) -> None:
    checked = _Checked(engine_of(fp32, 3, prefill_tokens="16"), 16)
    short = [checked.add(request_of(fp32, seed, 5, 30)) for seed in range(2)]
    checked.step()
    long = checked.add(request_of(fp32, 2, 160, 4))
    for count in range(2, 11):
        step = checked.step()
        assert (step.decoded, step.prefill_tokens, long.num_output_tokens) == (2, 16, 0)
        assert [sequence.num_output_tokens for sequence in short] == [count, count]
    checked.step()
    assert long.num_output_tokens == 1


def test_removing_a_sequence_again_or_after_its_end_frees_no_other_slot(fp32: Checkpoint) -> None:
    engine = engine_of(fp32, 3)
    sequences = [engine.sequence(request_of(fp32, seed, 9, count)) for seed, count in enumerate((1, 4, 4))]
    for sequence in sequences:
        engine.add(sequence)
    finished, removed, last = sequences
    assert engine.step().finished == [finished]
    for sequence in (finished, removed, removed):
        engine.remove(sequence)
    assert engine.used_slots == 1
    while engine.used_slots:
        engine.step()
    assert [last.result] == alone(fp32, [last.request])
