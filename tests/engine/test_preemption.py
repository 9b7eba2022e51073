"""A KV cache with too few pages: who is preempted, and who waits. `test_exact_bits` has preemption in random mixes."""

from dataclasses import replace

import pytest
from engine.engines import add_all, alone, engine_of
from engine.prompts import request_of
from engine.scheduling import running
from llama_engine.engine.engine import Engine
from llama_engine.errors import InvalidSettings, Unavailable
from llama_engine.model.loader import LoadedModel

MODEL_LEN = 128


@pytest.fixture(scope="module")
def short(int8: LoadedModel) -> LoadedModel:
    """With so few positions that a small pool holds a sequence of them; the same in all tests, for `alone`."""
    return replace(int8, max_model_len=MODEL_LEN)


def _engine(checkpoint: LoadedModel, slots: int, tokens: int = MODEL_LEN + 32, **parameters: str) -> Engine:
    return engine_of(checkpoint, slots, kv_cache_tokens=str(tokens), **parameters)


def test_the_youngest_of_the_lowest_priority_is_preempted(short: LoadedModel) -> None:
    engine = _engine(short, 4, 12 * 16)
    # Of different lengths, so that they need their pages in different steps.
    requests = [request_of(short, seed, 20 + seed, max_tokens=60) for seed in range(4)]
    requests[0] = replace(requests[0], priority=5)
    sequences = add_all(engine, requests)
    while not engine.step().preempted:
        assert engine.num_sequences == 4
    assert [sequence.kv_slot is None for sequence in sequences] == [True, False, False, False]
    while not engine.step().preempted:
        assert all(sequence.result is None for sequence in sequences)
    assert [sequence.kv_slot is None for sequence in sequences] == [True, False, False, True]


def test_the_oldest_is_never_preempted_and_newcomers_wait(short: LoadedModel) -> None:
    """Under a stream of arrivals: what was preempted goes first, and it isn't preempted at every page."""
    engine = _engine(short, 4)
    sequences = [engine.builder.build(request_of(short, seed, 20, max_tokens=60)) for seed in range(12)]
    waiting, preempted, queried = list(sequences), 0, 0
    while waiting or engine.num_sequences:
        if waiting and engine.can_admit(waiting[0]):
            engine.add(waiting.pop(0))
        oldest = next(sequence for sequence in sequences if sequence.result is None)
        had_slot = oldest.kv_slot is not None
        step = engine.step()
        assert not had_slot or oldest in step.finished or oldest.kv_slot is not None
        preempted += step.preempted
        queried += step.cache.queried_tokens if step.cache else 0
        queued = [bool(sequence.output_tokens) for sequence in engine._prefill.sequences]
        assert queued == sorted(queued, reverse=True), "a newcomer is before what was preempted"
    assert [sequence.result for sequence in sequences] == alone(short, [sequence.request for sequence in sequences])
    # Each sequence takes five pages for its output; a storm would preempt at most of them.
    assert 0 < preempted < len(sequences)
    # What was preempted isn't looked up again.
    assert queried == 20 * len(sequences)


def test_a_sequence_that_waits_for_pages_keeps_its_deadline(short: LoadedModel) -> None:
    with running(short, 4, kv_cache_tokens=str(MODEL_LEN)) as started:
        (holder,) = started.add(request_of(short, 1, 100, max_tokens=20))
        started.pace.let(2)
        late, patient = started.add(request_of(short, 2, 60), deadline=0.0), started.add(request_of(short, 3, 60))
        results = started.finish([holder, *late, *patient])
    assert isinstance(results[1], Unavailable)
    assert [results[0], results[2]] == alone(short, [holder.request, patient[0].request])


def test_a_pool_smaller_than_a_sequence_is_refused(short: LoadedModel) -> None:
    with pytest.raises(InvalidSettings, match="kv_cache_tokens is 64; it must be at least max_model_len, 128"):
        engine_of(short, 2, kv_cache_tokens="64")
