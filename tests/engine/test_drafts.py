"""Drafts change no answer: tokens, log probabilities and texts are those without, whether guesses are right or not."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from adapter_files import write_adapter
from engine.engines import alone, engine_of, needs_compiled_kernels, run
from engine.guesses import eager_drafter, guess_at_random
from engine.guided_texts import EngineOf, tag
from engine.prompts import any_requests
from engine.transcripts import Transcript, build, cuts, transcripts
from llama_engine.engine.draft_budget import DraftBudget
from llama_engine.engine.draft_matches import MAX_FINISHED, MAX_FINISHED_TOKENS, FinishedIndexes, NgramIndex
from llama_engine.engine.drafts import Acceptance
from llama_engine.engine.engine import Engine
from llama_engine.model.loader import LoadedModel
from llama_engine.observability.metrics import DRAFT_SOURCES
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.sampler import Sampler
from llama_engine.sampling.state import BatchIndices


def _answer(of: Transcript) -> tuple[object, ...]:
    """What a client gets, but for how a stream is cut into chunks. An error leaves out what was not sent yet."""
    text = "".join(text for _, text in of.chunks) if of.result.startswith("Completion") else ""
    return of.result, of.tokens, of.log_probs, of.cum_log_probs, of.prompt_log_probs, text


def test_answers_with_drafts_and_too_few_pages_are_those_without(
    int8: LoadedModel, engine_with_guides: EngineOf
) -> None:
    needs_compiled_kernels()
    short, requests = replace(int8, max_model_len=128), any_requests(int8, 40, 51)
    whole = transcripts(engine_with_guides(short, speculation="off"), requests)
    tokens = {request: of.tokens for request, of in zip(requests, whole, strict=True)}
    engine = engine_with_guides(short, 12, kv_cache_tokens="128")
    drafts = guess_at_random(engine, lambda of: tokens[replace(of.request, resume_ids=())], random.Random(1))
    given = transcripts(engine, requests)
    pairs = cuts(requests, whole, random.Random(2))[::9]
    resumed = transcripts(engine, [request for request, _ in pairs])
    assert [_answer(of) for of in given] == [_answer(of) for of in whole]
    assert [_answer(of) for of in resumed] == [_answer(must) for _, must in pairs]
    assert any(of.preempted for of in [*given, *resumed])
    right, guessed = sum(draft.accepted for draft in drafts), sum(len(draft.tokens) for draft in drafts)
    assert right > 200
    assert guessed - right > 200


TAG = tag({"type": "tag", "begin": "x", "content": {"type": "const_string", "value": "y" * 60}, "end": "<s>x"})
"""It forces a text and then a special token."""
LONG = json.dumps({"const": "no " * 4000})


def test_answers_with_the_servers_own_drafts_are_those_without(int8: LoadedModel, engine_with_guides: EngineOf) -> None:
    """Each request twice, so that the second one's answer is that of a finished sequence; guides force long texts."""
    needs_compiled_kernels()
    requests = [replace(request, cache_salt=str(seed % 3)) for seed, request in enumerate(any_requests(int8, 30, 52))]
    for kind, guide in (("json_schema", LONG), ("structural_tag", TAG), ("json_schema", '{"const": "a distribution"}')):
        guided = replace(
            PLAIN, max_tokens=90, min_tokens=0, guided_decoding_guide_type=kind, guided_decoding_guide=guide
        )
        requests += [guided, replace(guided, temperature=1.0, seed=3)]
    requests += [PLAIN, replace(PLAIN, max_tokens=200, min_tokens=200), *requests]
    engine = engine_with_guides(int8, 12)
    eager_drafter(engine)
    given = transcripts(engine, requests)
    whole = transcripts(engine_with_guides(int8, speculation="off"), requests)
    assert [_answer(of) for of in given] == [_answer(of) for of in whole]


def test_drafts_are_off_by_default_where_logits_are_not_batch_invariant(fp32: LoadedModel, int8: LoadedModel) -> None:
    assert engine_of(fp32)._drafter is None
    assert engine_of(int8, speculation="off")._drafter is None
    assert (engine_of(int8)._drafter is not None) == int8.info.batch_invariant


PLAIN = GenerationRequest(prompt="", prompt_tokens=tuple(range(300, 340)), max_tokens=24, min_tokens=24)


def tokens_of(engine: Engine, request: GenerationRequest) -> list[int]:
    (transcript,) = transcripts(engine, [request])
    return transcript.tokens


def _guesses(engine: Engine, request: GenerationRequest) -> dict[str, tuple[int, int]]:
    """Return the numbers of guessed and right tokens by source."""
    sequence, counts = build(engine, request), dict.fromkeys(DRAFT_SOURCES, (0, 0))
    for step in run(engine, [sequence]).steps:
        for draft in step.drafts:
            drafted, accepted = counts[draft.source]
            counts[draft.source] = drafted + len(draft.tokens), accepted + draft.accepted
    drafted, accepted = (sum(of) for of in zip(*counts.values(), strict=True))
    assert (sequence.num_accepted_draft_tokens, sequence.num_rejected_draft_tokens) == (accepted, drafted - accepted)
    return {source: count for source, count in counts.items() if count[0]}


def test_guesses_come_from_finished_sequences_predictions_and_guides(
    int8: LoadedModel, engine_with_guides: EngineOf
) -> None:
    needs_compiled_kernels()
    engine = engine_with_guides(int8, 8)
    eager_drafter(engine)
    first, other = _guesses(engine, PLAIN), _guesses(engine, replace(PLAIN, cache_salt="another"))
    assert "finished" not in first | other
    assert _guesses(engine, PLAIN)["finished"][1] >= 8
    tokens = tuple(tokens_of(engine, PLAIN))
    predicted = _guesses(engine, replace(PLAIN, cache_salt="third", prediction_tokens=tokens))
    assert predicted["prediction"][1] >= 15
    schema = '{"enum": ["a distribution of values", "a distribution of names"]}'
    guided = replace(PLAIN, guided_decoding_guide_type="json_schema", guided_decoding_guide=schema)
    assert _guesses(engine, guided)["guide"][1] > 0


def test_finished_sequences_are_not_searched_without_a_prefix_cache(int8: LoadedModel) -> None:
    needs_compiled_kernels()
    engine = engine_of(int8, 8, prefix_cache="off")
    eager_drafter(engine)
    assert not {"finished"} & {*_guesses(engine, PLAIN), *_guesses(engine, PLAIN)}


def test_no_guess_comes_from_a_finished_sequence_of_another_adapter(int8: LoadedModel, tmp_path: Path) -> None:
    needs_compiled_kernels()
    folders = [write_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")]
    engine = engine_of(int8, 8, lora_adapters=",".join(f"{folder.name}={folder}" for folder in folders))
    eager_drafter(engine)
    requests = [replace(PLAIN, adapter=adapter) for adapter in (*engine.adapters.loaded(), None)]
    assert not any("finished" in _guesses(engine, request) for request in requests)
    assert all("finished" in _guesses(engine, request) for request in requests)


def test_a_verification_that_fails_costs_the_guesses_alone(int8: LoadedModel) -> None:
    needs_compiled_kernels()
    engine = engine_of(int8, 8)
    (expected,) = alone(int8, [PLAIN])
    guess_at_random(engine, lambda _: tokens_of(engine_of(int8, 1, speculation="off"), PLAIN), random.Random(2))
    with patch.object(engine._decode._sampler, "sample", _failing_on_lists(engine._decode._sampler)):
        sequence = engine.builder.build(PLAIN)
        errors = run(engine, [sequence]).errors
    assert sequence.result == expected
    assert errors > 0
    assert sequence.num_accepted_draft_tokens == 0
    assert sequence.num_rejected_draft_tokens > 0


def _failing_on_lists(sampler: Sampler) -> Callable[..., torch.Tensor]:
    sample = sampler.sample

    def failing(logits: torch.Tensor, indices: BatchIndices, *rest: Any) -> torch.Tensor:  # noqa: ANN401 - passed on
        if isinstance(indices, list):
            raise RuntimeError("verifying failed, as the test wants")
        return sample(logits, indices, *rest)

    return failing


def test_an_index_prefers_a_longer_match_to_a_later_one() -> None:
    assert NgramIndex([1, 2, 3, 4, 5, 0, 2, 3, 4, 6]).find([1, 2, 3, 4]) == (4, 4)


def test_finished_sequences_are_bounded_for_each_salt_and_in_all() -> None:
    finished = FinishedIndexes()
    for number in range(10):
        finished.add(b"one", NgramIndex([number]))
    assert [index.tokens for index in finished.get(b"one")] == [[number] for number in (9, 8, 7, 6)][:MAX_FINISHED]
    finished.add(b"two", NgramIndex(range(MAX_FINISHED_TOKENS)))
    assert list(finished.get(b"one")) == []
    assert list(finished.get(b"three")) == []
    finished.add(b"two", NgramIndex(range(MAX_FINISHED_TOKENS + 1)))
    assert list(finished.get(b"two")) == []


def test_the_number_of_guesses_maximizes_the_expected_rate() -> None:
    budget = DraftBudget(32)
    assert budget.best_count(1, [1.0] * 8, 1.0) == 0, "nothing is measured"
    with patch("llama_engine.engine.draft_budget._timed", lambda _, tokens: 4.0 + tokens):
        budget.measure(lambda _: None)
    assert [budget.step_seconds(tokens) for tokens in (1, 3, 16, 31)] == [5, 7, 20, 35]
    assert budget.best_count(1, [0.9] * 3 + [0.1] * 3, 1.0) == 3
    assert budget.best_count(1, [0.1] * 8, 1.0) == 0
    assert budget.best_count(1, [0.21], 1.0) == 1
    assert budget.best_count(1, [0.21], 1.03) == 0
    assert budget.best_count(28, [0.9] * 4, 1.0) == 4
    assert budget.best_count(28, [0.8] * 4, 1.0) == 0
    for _ in range(200):
        budget.record(1, 10.0, verified=False)
        budget.record(1, math.nan, verified=False)
    assert 9 < budget.step_seconds(1) < 11
    assert budget.step_seconds(32) < 100
    assert budget.best_count(1, [1.0], 1.0) == 1
    for _ in range(200):
        budget.record(1, 10.0, verified=False)
        budget.record(2, 25.0, verified=True)
    assert budget.best_count(1, [1.0], 1.0) == 0


def test_a_share_of_right_guesses_is_followed() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.record(3, 2, 1)
        acceptance.record(0, 1, 0)
    one, two, three = acceptance.probabilities(3, 3)
    assert one > two > three
    assert acceptance.probabilities(0, 1)[0] < 0.05
    assert 0.05 < Acceptance(acceptance).probabilities(0, 1)[0] < 0.2
