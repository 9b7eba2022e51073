"""Structured output through the engine: what a guide, and everything beside it, makes of a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from engine.engines import alone, engine_of
from engine.prompts import requests_of
from llama_engine.api.generation_request import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.errors import GenerationError, InvalidRequest, RequestError
from llama_engine.model.loader import Checkpoint
from llama_engine.sampling import guide_matcher
from llama_engine.sampling.guided import GuideState
from llama_engine.sequence import Completion, Result
from numpy.typing import NDArray

END = 2
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "zip": {"type": "integer", "maximum": 99}},
    "required": ["city", "zip"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(fp32: Checkpoint) -> Iterator[Engine]:
    engine = engine_of(fp32, 4)
    yield engine
    engine.close()


def request(kind: str, guide: str, **values: object) -> GenerationRequest:
    plain = GenerationRequest("", tuple(range(40, 52)), max_tokens=120, temperature=1.0, seed=17)
    guided = replace(plain, guided_decoding_guide_type=kind, guided_decoding_guide=guide)
    return replace(guided, **values)  # type: ignore[arg-type]  # values are fields


def run(engine: Engine, *requests: GenerationRequest) -> list[Result]:
    return engine.generate(requests)


def text_of(result: Result) -> str:
    assert isinstance(result, Completion), result
    assert result.finish_reason == "stop"
    return result.text


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_completion_stops_at_the_token_that_finishes_its_guide(
    engine: Engine, ignore_eos: bool, temperature: float
) -> None:
    (result,) = run(engine, request("regex", DATE, ignore_eos=ignore_eos, temperature=temperature))
    assert re.fullmatch(DATE, text_of(result))
    assert isinstance(result, Completion)
    # Every token has a part of the text: none of them is an end token.
    assert result.num_output_tokens <= len(result.text)
    # Its last token may as well be the last one that max_tokens allows.
    bounded = request(
        "regex", DATE, ignore_eos=ignore_eos, temperature=temperature, max_tokens=result.num_output_tokens
    )
    assert run(engine, bounded) == [result]


def test_max_tokens_cuts_a_text_that_its_guide_would_continue(engine: Engine) -> None:
    (result,) = run(engine, request("regex", "[ab]{200}", max_tokens=7))
    assert isinstance(result, Completion)
    assert (result.finish_reason, result.num_output_tokens) == ("length", 7)
    assert re.fullmatch("[ab]+", result.text)


def test_a_guided_text_may_end_with_an_end_token_where_the_guide_lets_it(engine: Engine) -> None:
    bias = ((END, 100.0),)
    (greedy,) = run(engine, request("regex", "(abc){2,}", temperature=0.0, logit_bias=bias))
    assert text_of(greedy) == "abcabc"
    # Ignored, it is no end: the text goes on.
    (ignored,) = run(engine, request("regex", "(abc){2,}", temperature=0.0, logit_bias=bias, ignore_eos=True))
    assert isinstance(ignored, Completion)
    assert ignored.finish_reason == "length"
    assert re.fullmatch("(abc)*(a|ab)?", ignored.text)
    # And before min_tokens none may come.
    (longer,) = run(engine, request("regex", "(abc){2,}", temperature=0.0, logit_bias=bias, min_tokens=12))
    assert re.fullmatch("(abc){3,}", text_of(longer))


def test_a_finished_guide_ends_the_text_before_min_tokens(engine: Engine) -> None:
    (result,) = run(engine, request("regex", "abc", min_tokens=100))
    assert text_of(result) == "abc"


def test_a_stop_token_comes_where_the_text_may_end_and_only_there(engine: Engine, fp32: Checkpoint) -> None:
    a, b = (fp32.tokenizer.vocabulary.token_bytes.index(letter) for letter in (b"a", b"b"))
    bias = ((a, 100.0), (b, 50.0), (END, -100.0))
    (result,) = run(
        engine,
        request("regex", "a{3}[ab]*", temperature=0.0, logit_bias=bias, stop_token_ids=(b,), bad_words=(b"aaaa",)),
    )
    assert text_of(result) == "aaa"
    assert isinstance(result, Completion)
    assert result.stop_reason == str(b)


def test_a_stop_string_ends_a_guided_text(engine: Engine) -> None:
    (result,) = run(engine, request("regex", "x{3}-[0-9]{8}", stop_words=(b"x-",)))
    assert isinstance(result, Completion)
    assert (result.text, result.finish_reason, result.stop_reason) == ("xx", "stop", "x-")


def test_a_stop_string_that_ends_with_the_guide_is_cut_off(engine: Engine) -> None:
    (result,) = run(engine, request("regex", "abcd", stop_words=(b"cd",)))
    assert isinstance(result, Completion)
    assert (result.text, result.finish_reason, result.stop_reason) == ("ab", "stop", "cd")


def test_bad_words_hold_beside_a_guide(engine: Engine) -> None:
    results = run(engine, *(request("regex", "[ab]{9}", seed=seed, bad_words=(b"aa", b"bbb")) for seed in range(6)))
    for result in results:
        assert re.fullmatch("[ab]{9}", text_of(result))
        assert not re.search("aa|bbb", text_of(result))


def test_masks_that_leave_nothing_end_the_text_where_its_guide_lets_it(engine: Engine) -> None:
    (result,) = run(engine, request("regex", "a{2,9}", bad_words=(b"aaa",), min_tokens=50, logit_bias=((END, -100.0),)))
    assert text_of(result) == "aa"


@pytest.mark.parametrize(
    "values",
    [{"bad_words": (b"b",)}, {"allowed_token_ids": (5, END)}, {"bad_words": (b"ab",), "ignore_eos": True}],
    ids=lambda values: ", ".join(values),
)
def test_masks_that_leave_nothing_fail_that_sequence_alone(
    engine: Engine, fp32: Checkpoint, values: dict[str, object]
) -> None:
    good = requests_of(fp32, 3, 12)
    first, failed, *others = run(engine, good[0], request("regex", "aaab", **values), *good[1:])
    assert isinstance(failed, InvalidRequest)
    for name in ("guided_decoding_guide_type", *values):
        assert name in str(failed)
    assert re.search("together allow no token after [0-3] tokens", str(failed))
    assert [first, *others] == alone(fp32, good)


def test_choices_follow_the_guide_each_for_itself(engine: Engine) -> None:
    four = request("json_schema", json.dumps(CITY), n=4, temperature=1.4)
    results = run(engine, *four.choices())
    texts = [text_of(result) for result in results]
    for text in texts:
        jsonschema.validate(json.loads(text), CITY)
    assert len(set(texts)) > 1


def test_rows_that_move_keep_their_guides_and_harm_no_other(engine: Engine, fp32: Checkpoint) -> None:
    """More sequences than slots, of different lengths: each leaves when its guide is finished."""
    patterns = [
        f"({letter}[0-9]){{{count}}}"
        for letter, count in zip("abcdefghij", (9, 1, 7, 2, 8, 3, 6, 4, 5, 1), strict=True)
    ]
    guided = [request("regex", pattern, seed=seed) for seed, pattern in enumerate(patterns)]
    plain = requests_of(fp32, len(guided), 12, 9)
    results = run(engine, *(one for pair in zip(guided, plain, strict=True) for one in pair))
    for pattern, result in zip(patterns, results[::2], strict=True):
        assert re.fullmatch(pattern, text_of(result))
    assert results[1::2] == alone(fp32, plain)
    # And what a row samples does not depend on who is beside it.
    assert results[::2] == [run(engine, one)[0] for one in guided]


class Raising(GuideState):
    """A guide whose `fill`, or whose `accept`, raises at the third token."""

    def __init__(self, method: str) -> None:
        self._method, self._count = method, 0

    @property
    def finished(self) -> bool:
        return False

    @property
    def may_end(self) -> bool:
        return False

    def fill(self, allowed: NDArray[np.int32]) -> None:
        if self._count == 2 and self._method == "fill":
            raise RuntimeError("no mask")
        allowed.fill(-1)

    def accept(self, token: int) -> bool:
        self._count += 1
        if self._count == 3 and self._method == "accept":
            raise RuntimeError("no token")
        return self._count < 3 or self._method != "refuse"


@pytest.mark.parametrize(
    ("method", "message"),
    [("fill", "decoding failed"), ("accept", "decoding failed"), ("refuse", "does not conform to the guide after 3")],
)
def test_a_guide_that_fails_in_a_step_fails_its_sequence_alone(
    engine: Engine, fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch, method: str, message: str
) -> None:
    good = requests_of(fp32, 3, 12)
    monkeypatch.setattr(engine._builder.guides, "start_soon", lambda *_: Raising(method))
    first, failed, *others = run(engine, good[0], request("regex", "a*"), *good[1:])
    assert isinstance(failed, GenerationError)
    assert message in str(failed)
    assert [first, *others] == alone(fp32, good)


@pytest.mark.parametrize(
    "grammar",
    ["root ::= root root | [a-z]", 'root ::= a\na ::= b a c | "x" | b\nb ::= a b | "y" | c\nc ::= a | b c b | "z"'],
)
def test_an_ambiguous_grammar_whose_masks_take_ever_longer_fails_its_sequence_alone(
    engine: Engine, fp32: Checkpoint, grammar: str
) -> None:
    good = requests_of(fp32, 3, 12)
    slow = request("ebnf_grammar", grammar, max_tokens=450, min_tokens=450, ignore_eos=True)
    first, failed, *others = run(engine, good[0], slow, *good[1:])
    assert isinstance(failed, InvalidRequest)
    assert str(failed).startswith("guided_decoding_guide can't be followed to its end: it ")
    assert [first, *others] == alone(fp32, good)


def test_a_guide_that_becomes_too_complex_fails_its_sequence_alone(
    engine: Engine, fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_matcher, "MAX_LEXER_STATES", 2000)
    good = requests_of(fp32, 3, 12)
    # Long tokens only: each makes tens of states.
    grown = request("regex", r"[\p{L}\p{N}]{1,2000}", temperature=2.0, max_tokens=400, min_tokens=400)
    first, failed, *others = run(engine, good[0], grown, *good[1:])
    assert isinstance(failed, InvalidRequest)
    assert str(failed).startswith("guided_decoding_guide can't be followed to its end")
    assert [first, *others] == alone(fp32, good)


def test_a_schema_that_is_too_complex_once_a_token_is_there_is_refused_and_fails_its_sequence_alone(
    engine: Engine, fp32: Checkpoint
) -> None:
    # After the brace each of the properties may follow: more than a row of llguidance's parser holds.
    properties = {f"p{number}": {"type": "string"} for number in range(500)}
    good = requests_of(fp32, 3, 12)
    wide = request("json_schema", json.dumps({"type": "object", "properties": properties}))
    first, failed, *others = run(engine, good[0], wide, *good[1:])
    assert isinstance(failed, InvalidRequest)
    assert str(failed).startswith("guided_decoding_guide can't be followed to its end: it is refused: ")
    assert [first, *others] == alone(fp32, good)


@pytest.mark.parametrize(
    ("kind", "guide"), [("regex", "("), ("json_schema", "false"), ("ebnf_grammar", "root ::= root")]
)
def test_a_refused_guide_fails_before_it_takes_a_slot(engine: Engine, kind: str, guide: str) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^guided_decoding_guide "):
            run(engine, request(kind, guide))
    assert engine.used_slots == 0
