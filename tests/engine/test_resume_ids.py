"""The field resume_ids: which ids are refused and why, that tokens are counted once, and that bad ids harm no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.engines import completions, engine_of
from engine.guided_texts import END, EngineOf
from engine.parsing import parse, refusal
from engine.prompts import request_of
from engine.scheduling import running
from llama_engine.errors import InvalidRequest
from llama_engine.model.loader import LoadedModel
from llama_engine.text.tokenizer import Tokenizer

IDS = {"resume_ids": [5, 6, 7], "max_tokens": 4, "min_tokens": 0, "seed": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resume_ids": [5, 9999]}, "resume_ids is a list with token 9999; it must be of tokens from 0 to 3071"),
        ({"max_tokens": 3}, "resume_ids is a list of 3 tokens; it must be fewer than max_tokens, which is 3"),
        ({"n": 2}, "n is 2; it must be 1 beside resume_ids, which are the tokens of one completion"),
    ],
)
def test_ids_out_of_bounds_are_refused(tokenizer: Tokenizer, values: dict[str, object], message: str) -> None:
    assert parse(tokenizer, **IDS).resume_ids == (5, 6, 7)
    assert refusal(tokenizer, **{**IDS, **values}) == message


def test_only_a_sampled_request_needs_its_seed(tokenizer: Tokenizer) -> None:
    sampled = {name: value for name, value in IDS.items() if name != "seed"}
    message = "seed is missing; it must be the interrupted request's beside resume_ids, if temperature is not 0"
    # By the checkpoint's default temperature, too.
    assert refusal(tokenizer, **sampled) == message
    for greedy in ({"temperature": 0.0}, {"top_p": 0.0}, {"temperature": 1.0, "random_seed": 7}):
        assert parse(tokenizer, **sampled, **greedy).resume_ids == (5, 6, 7)


def _encode(checkpoint: LoadedModel, text: str) -> tuple[int, ...]:
    return checkpoint.tokenizer.encode_inside(text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("the end", {"stop_words": (b"en",)}),
        ("a stop", {"stop_token_ids": (9,)}),
        ("an end", {}),
    ],
)
def test_ids_within_which_the_text_ends_are_refused(
    int8: LoadedModel, engine_with_guides: EngineOf, text: str, values: dict[str, object]
) -> None:
    ids = _encode(int8, text) + {"an end": (END,), "a stop": (9,)}.get(text, ())
    request = replace(request_of(int8, 1, 9, 30), min_tokens=0, **values)  # type: ignore[arg-type]
    engine_with_guides(int8, 1).builder.build(replace(request, resume_ids=ids[:1]))
    with pytest.raises(InvalidRequest) as refused:
        engine_with_guides(int8, 1).builder.build(replace(request, resume_ids=(*ids, 40)))
    message = f"resume_ids is a list of {len(ids) + 1} tokens; it must be fewer: the text ends with token {len(ids)}"
    assert str(refused.value) == message
    # Before min_tokens, stop strings don't count; and ignored end tokens never do.
    if text != "a stop":
        engine_with_guides(int8, 1).builder.build(
            replace(request, resume_ids=(*ids, 40), min_tokens=29, ignore_eos=True)
        )


@pytest.mark.parametrize(
    ("guide", "text", "message"),
    [
        ("[a-z]{30}", "abX", "resume_ids is a list of {n} tokens; token {n} must conform to guided_decoding_guide"),
        ("ab", "ab", "resume_ids is a list of {n} tokens; it must be fewer: the text ends with token {n}"),
    ],
)
def test_ids_that_the_guide_rules_out_fail_that_sequence_alone(
    int8: LoadedModel, guide: str, text: str, message: str
) -> None:
    ids = tuple(id_ for letter in text for id_ in _encode(int8, letter))
    guided = replace(request_of(int8, 1, 9, 30), guided_decoding_guide_type="regex", guided_decoding_guide=guide)
    others = [request_of(int8, seed, 12) for seed in range(3)]
    expected = completions(engine_of(int8, 1), others)
    with running(int8, 2) as started:
        sequences = started.add(others[0], replace(guided, resume_ids=ids), *others[1:])
        first, failed, *rest = started.finish(sequences)
    assert isinstance(failed, InvalidRequest)
    assert str(failed) == message.format(n=len(ids))
    assert [first, *rest] == expected
