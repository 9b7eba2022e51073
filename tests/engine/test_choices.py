"""Choices of one prompt: the texts of requests alone, one prefill, and no effect on each other."""

from dataclasses import replace

import pytest
from engine.engines import alone, engine_of, run
from engine.forward_passes import ForwardPass, watching
from engine.prompts import request_of
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion, Result
from llama_engine.engine.sequence import Sequence
from llama_engine.engine.sequence_builder import choices_of
from llama_engine.model.loader import LoadedModel
from llama_engine.request.parser import GenerationRequest


def _request(checkpoint: LoadedModel, n: int, size: int = 40, max_tokens: int = 8) -> GenerationRequest:
    return replace(request_of(checkpoint, size, size, max_tokens), n=n)


def _expected(checkpoint: LoadedModel, request: GenerationRequest) -> list[Completion]:
    return alone(checkpoint, choices_of(request))


def _prefilled(engine: Engine, sequences: list[Sequence]) -> tuple[list[Result | None], int]:
    """Run the sequences; return their results, and how many prompt tokens were computed."""
    passes: list[ForwardPass] = []
    with watching(passes.append):
        results = run(engine, sequences).results
    return results, sum(forward.tokens for forward in passes if not forward.decodes)


@pytest.mark.parametrize("budget", [512, 16])
def test_the_prompt_of_choices_is_computed_once(checkpoint: LoadedModel, budget: int) -> None:
    request = _request(checkpoint, 4)
    engine = engine_of(checkpoint, 6, prefill_tokens=str(budget))
    results, prefilled = _prefilled(engine, engine.builder.choices(request))
    assert results == _expected(checkpoint, request)
    assert prefilled == 40
    assert len({result.text for result in results if isinstance(result, Completion)}) > 1
    assert [result.choice for result in results if isinstance(result, Completion)] == [0, 1, 2, 3]


def test_more_choices_than_slots_copy_the_prompt_from_one_that_still_runs(int8: LoadedModel) -> None:
    request = _request(int8, 5)
    engine = engine_of(int8, 2)
    first, *others = engine.builder.choices(request)
    # The first one lasts, and each other one ends sooner.
    others = [engine.builder.build(replace(choice.request, max_tokens=2, min_tokens=2)) for choice in others]
    for choice in others:
        choice.share = first.share
    results, prefilled = _prefilled(engine, [first, *others])
    assert results == alone(int8, [choice.request for choice in (first, *others)])
    assert prefilled == 40


@pytest.mark.parametrize(("prefix_cache", "computed"), [("off", 3 * 40), ("on", 40 + 2 * (40 % 16))])
def test_a_choice_without_a_source_of_its_prompt_computes_what_is_not_cached(
    int8: LoadedModel, prefix_cache: str, computed: int
) -> None:
    request = _request(int8, 3)
    engine = engine_of(int8, 1, prefix_cache=prefix_cache)
    results, prefilled = _prefilled(engine, engine.builder.choices(request))
    assert results == _expected(int8, request)
    assert prefilled == computed
