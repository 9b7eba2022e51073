"""Structured output through the engine: what a guide, and everything beside it, makes of a completion."""

import json
import re
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from engine.engines import alone
from engine.guided_texts import EngineOf
from engine.prompts import requests_of
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.errors import GenerationError, InvalidRequest, RequestError
from llama_engine.guides import matcher as guide_matcher
from llama_engine.guides.matcher import GuideState
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from numpy.typing import NDArray

END = 2
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
NO_END = ((END, -100.0),)
NOT_FOLLOWED = "guided_decoding_guide can't be followed to its end: it "


@pytest.fixture(scope="module")
def engine(engine_with_guides: EngineOf, fp32: LoadedModel) -> Engine:
    return engine_with_guides(fp32, 4)


def request(kind: str, guide: str, **values: object) -> GenerationRequest:
    plain = GenerationRequest("", tuple(range(40, 52)), max_tokens=120, temperature=1.0, seed=17)
    guided = replace(plain, guided_decoding_guide_type=kind, guided_decoding_guide=guide)
    return replace(guided, **values)  # type: ignore[arg-type]  # values are fields


def completion(engine: Engine, kind: str, guide: str, **values: object) -> Completion:
    (result,) = engine.generate([request(kind, guide, **values)])
    assert isinstance(result, Completion), result
    return result


def failure_alone(engine: Engine, fp32: LoadedModel, failing: GenerationRequest) -> RequestError:
    """Return the error of a request, beside others that it costs nothing."""
    good = requests_of(fp32, 3, 12)
    first, failed, *others = engine.generate([good[0], failing, *good[1:]])
    assert isinstance(failed, RequestError)
    assert [first, *others] == alone(fp32, good)
    return failed


@pytest.mark.parametrize(("ignore_eos", "temperature"), [(False, 0.0), (True, 1.5)])
def test_a_completion_stops_at_the_token_that_finishes_its_guide(
    engine: Engine, ignore_eos: bool, temperature: float
) -> None:
    values: dict[str, object] = {"ignore_eos": ignore_eos, "temperature": temperature}
    result = completion(engine, "regex", DATE, **values)
    assert re.fullmatch(DATE, result.text)
    assert result.finish_reason == "stop"
    # Every token has a part of the text: none of them is an end token.
    assert result.num_output_tokens <= len(result.text)
    # Its last token may as well be the last one that max_tokens allows.
    assert completion(engine, "regex", DATE, max_tokens=result.num_output_tokens, **values) == result


@pytest.mark.parametrize(
    ("guide", "values", "expected"),
    [
        ("abc", {"min_tokens": 100}, ("abc", "stop", "")),
        ("x{3}-[0-9]{8}", {"stop_words": (b"x-",)}, ("xx", "stop", "x-")),
        ("abcd", {"stop_words": (b"cd",)}, ("ab", "stop", "cd")),
        # The masks leave nothing where the guide lets the text end.
        ("a{2,9}", {"bad_words": (b"aaa",), "min_tokens": 50, "logit_bias": NO_END}, ("aa", "stop", "")),
    ],
)
def test_what_ends_a_guided_text(
    engine: Engine, guide: str, values: dict[str, object], expected: tuple[str, str, str]
) -> None:
    result = completion(engine, "regex", guide, **values)
    assert (result.text, result.finish_reason, result.stop_reason) == expected


@pytest.mark.parametrize(
    "values",
    [{"allowed_token_ids": (5, END)}, {"bad_words": (b"ab",), "ignore_eos": True}],
    ids=lambda values: ", ".join(values),
)
def test_masks_that_leave_nothing_fail_that_sequence_alone(
    engine: Engine, fp32: LoadedModel, values: dict[str, object]
) -> None:
    failed = failure_alone(engine, fp32, request("regex", "aaab", **values))
    assert isinstance(failed, InvalidRequest)
    for name in ("guided_decoding_guide_type", *values):
        assert name in str(failed)
    assert re.search("together allow no token after [0-3] tokens", str(failed))


class Faulty(GuideState):
    """A guide whose `fill` or `accept` raises, or whose `accept` refuses, at the third token."""

    finished = may_end = False

    def __init__(self, fault: str) -> None:
        self._fault, self._count = fault, 0

    def fill(self, allowed: NDArray[np.int32]) -> None:
        if self._count == 2 and self._fault == "fill":
            raise RuntimeError("no mask")
        allowed.fill(-1)

    def accept(self, token: int) -> bool:
        self._count += 1
        if self._count == 3 and self._fault == "accept":
            raise RuntimeError("no token")
        return self._count < 3 or self._fault != "refuse"


@pytest.mark.parametrize(
    ("fault", "message"),
    [("fill", "decoding failed"), ("accept", "decoding failed"), ("refuse", "does not conform to the guide after 3")],
)
def test_a_guide_that_fails_in_a_step_fails_its_sequence_alone(
    engine: Engine, fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    guide: Future[GuideState] = Future()
    guide.set_result(Faulty(fault))
    monkeypatch.setattr(engine.guides, "start", lambda *_: guide)
    failed = failure_alone(engine, fp32, request("regex", "a*"))
    assert isinstance(failed, GenerationError)
    assert message in str(failed)


WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}}


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        ("ebnf_grammar", "root ::= root root | [a-z]", NOT_FOLLOWED),
        # Long tokens only: each makes tens of states.
        ("regex", r"[\p{L}\p{N}]{1,2000}", f"{NOT_FOLLOWED}is refused: lexer error: too many states"),
        # After the brace each of the properties may follow: more than a row of llguidance's parser holds.
        ("json_schema", json.dumps(WIDE), f"{NOT_FOLLOWED}is refused: "),
    ],
    ids=["ambiguous", "too many states", "too many properties"],
)  # fmt: skip
def test_a_guide_that_becomes_too_complex_fails_its_sequence_alone(
    engine: Engine, fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch, kind: str, guide: str, message: str
) -> None:
    if kind == "regex":
        monkeypatch.setattr(guide_matcher, "MAX_LEXER_STATES", 2000)
    complex_request = request(kind, guide, temperature=2.0, max_tokens=450, min_tokens=450, ignore_eos=True)
    failed = failure_alone(engine, fp32, complex_request)
    assert isinstance(failed, InvalidRequest)
    assert str(failed).startswith(message)
