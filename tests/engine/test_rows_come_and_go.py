"""Rows that enter and leave the engine at any time: the others' tokens, the order, and the work that a step may do."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine.engines import completions, engine_of
from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine, StepResult
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Result, Sequence


def _request(checkpoint: Checkpoint, size: int, randomness: random.Random, max_tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(
        prompt="", prompt_tokens=random_prompt(checkpoint.tokenizer, range(size, size + 1), randomness)[1],
        max_tokens=max_tokens, min_tokens=randomness.choice((0, max_tokens)), seed=randomness.getrandbits(64),
        temperature=float(np.float32(randomness.choice((0.0, 0.8)))), repetition_penalty=randomness.choice((1.0, 1.5)),
        frequency_penalty=randomness.choice((0.0, 1.0)), bad_words=randomness.choice(((), (b"e",))),
    )  # fmt: skip


@dataclass
class _Life:
    """Rows that come and go at random; checks every step, and keeps in which order rows entered and started."""

    engine: Engine
    budget: int
    decoding: set[Sequence] = field(default_factory=set)
    inside: list[Sequence] = field(default_factory=list)
    dropped: set[Sequence] = field(default_factory=set)
    entered: list[Sequence] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    drops: Counter[str] = field(default_factory=Counter)

    def enter(self, row: Sequence) -> None:
        self.engine.add(row)
        self.inside.append(row)
        self.entered.append(row)

    def drop(self, row: Sequence) -> None:
        what = "decoding" if row in self.decoding else "half read" if row.num_cached else "waiting"
        self.drops[what] += 1
        taken = self.engine.used_slots
        self.engine.remove(row)
        assert self.engine.used_slots == taken - 1, "the slot isn't free at once"
        self.inside.remove(row)
        self.decoding.discard(row)
        self.dropped.add(row)

    def step(self) -> StepResult:
        step = self.engine.step()
        assert step.errors == 0
        assert step.prefill_tokens <= self.budget
        assert step.decoded == len(self.decoding), "a row that decodes got no token"
        assert step.prefill_tokens or len(self.inside) == len(self.decoding), "nobody read the prompts that wait"
        assert not self.decoding & set(step.started)
        self.started += step.started
        self.decoding |= set(step.started)
        for row in step.finished:
            assert row.result is not None
            self.decoding.remove(row)
            self.inside.remove(row)
        assert self.engine.used_slots == len(self.inside)
        return step


@pytest.mark.parametrize(("slots", "budget"), [(1, 9), (2, 16), (4, 40), (8, 32)])
def test_who_leaves_changes_the_others_or_the_order(fp32: Checkpoint, slots: int, budget: int) -> None:
    randomness = random.Random(slots)
    sizes = (3, 8, 8, 20, 70, 70)
    pool = [_request(fp32, size, randomness, randomness.randint(2, 8)) for size in sizes]
    alone: list[Result] = [completions(engine_of(fp32, 1), [request])[0] for request in pool]
    engine = engine_of(fp32, slots, prefill_tokens=str(budget))
    life, rows = _Life(engine, budget), dict[Sequence, int]()
    for _ in range(90):
        while engine.used_slots < slots and randomness.random() < 0.7:
            index = randomness.randrange(len(pool))
            row = engine.sequence(pool[index])
            rows[row] = index
            life.enter(row)
        if life.inside and randomness.random() < 0.15:
            half_read = [row for row in life.inside if row.num_cached and row not in life.decoding]
            life.drop(randomness.choice(half_read or life.inside))
        life.step()
    while life.inside:
        life.step()
    for row, index in rows.items():
        assert row.result == (None if row in life.dropped else alone[index])
    survivors = [row for row in life.entered if row not in life.dropped or row in life.started]
    assert life.started == survivors, "somebody was overtaken"
    assert life.drops["half read"]
    assert life.drops["decoding"]
    assert life.drops["waiting"] or slots == 1


def test_a_running_row_waits_while_a_long_prompt_is_read(fp32: Checkpoint) -> None:
    randomness = random.Random(2)
    engine = engine_of(fp32, 3, prefill_tokens="16")
    life = _Life(engine, 16)
    running = [engine.sequence(_request(fp32, 5, randomness, 30)) for _ in range(2)]
    for row in running:
        life.enter(row)
    life.step()
    long = engine.sequence(_request(fp32, 160, randomness, 4))
    life.enter(long)
    counts = [row.stop_checker.num_tokens for row in running]
    for done in range(1, 10):
        step = life.step()
        assert (step.decoded, step.prefill_tokens, list(step.started)) == (2, 16, [])
        assert [row.stop_checker.num_tokens for row in running] == [count + done for count in counts]
    assert list(life.step().started) == [long]


def test_a_row_dropped_twice_or_after_its_end_frees_a_slot_of_another(fp32: Checkpoint) -> None:
    randomness = random.Random(6)
    engine = engine_of(fp32, 3)
    rows = [engine.sequence(_request(fp32, 9, randomness, count)) for count in (1, 4, 4)]
    for row in rows:
        engine.add(row)
    assert engine.step().ended == rows[:1]
    for row in (rows[0], rows[1], rows[1]):
        engine.remove(row)
    assert engine.used_slots == 1
    while engine.used_slots:
        engine.step()
    assert rows[2].result == completions(engine, [rows[2].request])[0]


def test_a_step_of_an_empty_engine_does_something(fp32: Checkpoint) -> None:
    assert engine_of(fp32, 2).step() == StepResult([], [])
