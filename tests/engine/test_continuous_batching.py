"""A request's text is the same, whatever is added and removed around it between any two steps."""

import random

import pytest
from engine.engines import add_all, alone, churn, completions, engine_of
from engine.prompts import random_request, request_of
from llama_engine.model.loader import LoadedModel


@pytest.mark.parametrize(("slots", "budget"), [(1, 9), (4, 40)])
def test_removed_sequences_change_neither_the_others_nor_their_order(
    fp32: LoadedModel, slots: int, budget: int
) -> None:
    randomness = random.Random(slots)
    pool = [random_request(fp32, randomness) for _ in range(12)]
    expected = dict(zip(pool, alone(fp32, pool), strict=True))
    engine = engine_of(fp32, slots, prefill_tokens=str(budget))
    sequences = [engine.builder.build(randomness.choice(pool)) for _ in range(40)]
    removed, _ = churn(engine, sequences, budget, randomness)
    for sequence in sequences:
        assert sequence.result == (None if sequence in removed else expected[sequence.request])
    # With one slot no sequence waits for the prefill of another.
    assert {"partly cached", "decode", *(["prefill"] if slots > 1 else [])} <= set(removed.values())


def test_a_text_is_the_same_in_any_batch(checkpoint: LoadedModel) -> None:
    randomness = random.Random(33)
    requests = [random_request(checkpoint, randomness) for _ in range(12)]
    expected = alone(checkpoint, requests)
    for slots in (8, 3):
        engine = engine_of(checkpoint, slots)
        assert completions(engine, requests) == expected
        assert completions(engine, requests[::-1]) == expected[::-1]


def test_removing_a_sequence_again_or_after_its_end_frees_no_other_slot(fp32: LoadedModel) -> None:
    engine = engine_of(fp32, 3)
    finished, removed, last = add_all(engine, [request_of(fp32, seed, 9, 4 if seed else 1) for seed in range(3)])
    assert engine.step().finished == [finished]
    for sequence in (finished, removed, removed):
        engine.remove(sequence)
    assert engine.used_slots == 1
    while engine.used_slots:
        engine.step()
    assert [last.result] == alone(fp32, [last.request])
