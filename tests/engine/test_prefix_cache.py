"""The prefix cache: what it has isn't computed again, and no text, failure or other salt shows that it exists.

Choices of one prompt share it without the cache, too.
"""

from dataclasses import replace

import pytest
import torch
from engine.engines import Run, add_all, alone, assert_consistent, engine_of, run, spoil_cache
from engine.prompts import request_of
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.engine.sequence_builder import choices_of
from llama_engine.errors import GenerationError
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest

PAGE = 16


def _computed(engine: Engine, requests: list[GenerationRequest]) -> tuple[Run, int]:
    """Run the requests together; return the results, and how many prompt tokens were computed."""
    sequences = [sequence for request in requests for sequence in engine.builder.choices(request)]
    outcome = run(engine, sequences)
    assert_consistent(engine)
    return outcome, sum(step.prefill_tokens for step in outcome.steps)


def _followed(request: GenerationRequest, tokens: tuple[int, ...]) -> GenerationRequest:
    return replace(request, prompt_tokens=request.prompt_tokens + tokens)


def test_a_prompt_is_computed_once(int8: LoadedModel) -> None:
    engine, request = engine_of(int8, 4), request_of(int8, 1, 100)
    expected = alone(int8, [request, replace(request, seed=5)])
    first, computed = _computed(engine, [request])
    again, tail = _computed(engine, [request, replace(request, seed=5)])
    assert [*first.results, *again.results] == [expected[0], *expected]
    assert (computed, tail) == (100, 2 * (100 % PAGE))


def test_prompts_that_arrive_together_share_what_one_of_them_computes(int8: LoadedModel) -> None:
    common = request_of(int8, 1, 70)
    requests = [_followed(common, (300 + number,)) for number in range(6)]
    for budget in (512, 20):
        engine = engine_of(int8, 6, prefill_tokens=str(budget))
        outcome, computed = _computed(engine, requests)
        assert outcome.results == alone(int8, requests)
        assert computed == 71 + 5 * (71 - 64)


def test_a_prompt_whose_log_probs_are_requested_is_computed_whole(int8: LoadedModel) -> None:
    engine, request = engine_of(int8, 2), request_of(int8, 1, 100)
    _computed(engine, [request])
    sequence = engine.builder.build(replace(request, prompt_logprobs=2))
    fresh = engine_of(int8, 2).builder.build(sequence.request)
    assert sum(step.prefill_tokens for step in run(engine, [sequence]).steps) == 100
    run(engine_of(int8, 2), [fresh])
    assert len(sequence.prompt_log_probs) == 99
    seen, expected = (torch.tensor([token.log_prob for token in of.prompt_log_probs]) for of in (sequence, fresh))
    assert torch.allclose(seen, expected, atol=1e-5)


def test_prompts_whose_log_probs_are_requested_do_not_wait_for_each_other(int8: LoadedModel) -> None:
    requests = [replace(request_of(int8, 1, 40), prompt_logprobs=0, seed=seed) for seed in range(4)]
    engine = engine_of(int8, 4)
    outcome, computed = _computed(engine, requests)
    assert computed == outcome.steps[0].prefill_tokens == 4 * 40


def test_a_sequence_is_admitted_only_if_pages_remain_beside_its_prefix(int8: LoadedModel) -> None:
    engine = engine_of(replace(int8, max_model_len=256), 4, kv_cache_tokens="272", prefill_tokens="512")
    long = request_of(int8, 1, 208, max_tokens=8)
    _computed(engine, [long])
    add_all(engine, [request_of(int8, 2, 30, max_tokens=40)])
    engine.step()
    # All of its prefix is cached, but nothing is left for its last page and the other's growth.
    follower = engine.builder.build(_followed(long, tuple(range(300, 330))))
    assert not engine.can_admit(follower)
    add_all(engine, [request_of(int8, 3, 5)])
    assert not engine.can_admit(follower)


@pytest.mark.parametrize("prefix", ["own", "found"])
def test_a_sequence_that_is_not_finite_leaves_nothing_to_find(int8: LoadedModel, prefix: str) -> None:
    engine, request = engine_of(int8, 2), request_of(int8, 1, 100)
    if prefix == "found":
        _computed(engine, [request])
    (sequence,) = add_all(engine, [request])
    engine.step()
    for page in sequence.pages:
        spoil_cache(engine, page)
    engine.step()
    assert isinstance(sequence.result, GenerationError)
    outcome, computed = _computed(engine, [request])
    assert outcome.results == alone(int8, [request])
    assert computed == 100


def test_a_cancelled_sequence_leaves_what_it_has_computed(int8: LoadedModel) -> None:
    engine, request = engine_of(int8, 2), request_of(int8, 1, 100)
    (sequence,) = add_all(engine, [request])
    engine.step()
    engine.remove(sequence)
    outcome, computed = _computed(engine, [request])
    assert isinstance(outcome.results[0], Completion)
    assert computed == 100 % PAGE


def test_more_choices_than_slots_copy_the_prompt_from_one_that_still_runs(int8: LoadedModel) -> None:
    engine = engine_of(int8, 2)
    first, *others = engine.builder.choices(replace(request_of(int8, 40, 40), n=5))
    # The first one lasts, and each other one ends sooner.
    others = [engine.builder.build(replace(choice.request, max_tokens=2, min_tokens=2)) for choice in others]
    for choice in others:
        choice.share = first.share
    outcome = run(engine, [first, *others])
    assert outcome.results == alone(int8, [choice.request for choice in (first, *others)])
    assert sum(step.prefill_tokens for step in outcome.steps) == 40


@pytest.mark.parametrize(("prefix_cache", "expected"), [("off", 3 * 40), ("on", 40 + 2 * (40 % PAGE))])
def test_a_choice_without_a_source_of_its_prompt_computes_what_is_not_cached(
    int8: LoadedModel, prefix_cache: str, expected: int
) -> None:
    request = replace(request_of(int8, 40, 40), n=3)
    outcome, computed = _computed(engine_of(int8, 1, prefix_cache=prefix_cache), [request])
    assert outcome.results == alone(int8, choices_of(request))
    assert computed == expected
