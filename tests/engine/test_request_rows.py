"""Several rows in one request, and inputs of the wrong shape."""

import numpy as np
import pytest
from engine.contract import DTYPES, parser, raw, tensor
from llama_engine.api.request_parser import RawInputs
from llama_engine.errors import InvalidRequest
from llama_engine.text.tokenizer import Tokenizer

WORDS = ("stop_words", "bad_words")
EVERY: dict[str, list[object]] = {
    "text_input": ["def a", "class B:", "import c"],
    "max_tokens": [3, 4, 5],
    "min_tokens": [0, 1, 2],
    "temperature": [0.0, 0.5, 2.0],
    "top_k": [0, 1, 9],
    "top_p": [1.0, 0.5, 0.25],
    "repetition_penalty": [1.0, 1.5, 0.5],
    "frequency_penalty": [0.0, -1.5, 1.5],
    "presence_penalty": [0.0, 1.25, -1.25],
    "seed": [0, 1, 2**64 - 1],
    "stop_words": [["a", "b"], ["c", ""], ["", ""]],
    "bad_words": [["", ""], ["x", "y"], ["", "z"]],
    "exclude_input_in_output": [True, False, True],
}


def _three_rows(**changed: list[object]) -> RawInputs:
    return {name: tensor(name, rows) for name, rows in (EVERY | changed).items()}


def test_every_row_gets_its_own_values(tokenizer: Tokenizer) -> None:
    assert set(EVERY) == set(DTYPES)
    requests = parser(tokenizer).parse(_three_rows())
    assert [request.prompt for request in requests] == EVERY["text_input"]
    assert [request.prompt_tokens for request in requests] == [tokenizer.encode(request.prompt) for request in requests]
    assert [request.stop_words for request in requests] == [(b"a", b"b"), (b"c",), ()]
    assert [request.bad_words for request in requests] == [(), (b"x", b"y"), (b"z",)]
    for name in set(EVERY) - {"text_input", *WORDS}:
        assert [getattr(request, name) for request in requests] == EVERY[name], name


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("text_input", ""),
        ("text_input", b"\xff"),
        ("max_tokens", 0),
        ("min_tokens", 9),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 3.0),
        ("presence_penalty", -3.0),
        ("stop_words", [b"\xff", b""]),
        ("bad_words", [b"", b"\xff"]),
    ],
)
def test_an_error_names_its_row(tokenizer: Tokenizer, name: str, bad: object) -> None:
    first, _, third = EVERY[name]
    with pytest.raises(InvalidRequest, match=f"^row 1: {name} is .*; it must be "):
        parser(tokenizer).parse(_three_rows(**{name: [first, bad, third]}))


def test_rows_without_a_seed_get_different_ones(tokenizer: Tokenizer) -> None:
    inputs = dict(_three_rows())
    del inputs["seed"]
    assert len({request.seed for request in parser(tokenizer).parse(inputs)}) == 3


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name in sorted(set(DTYPES) - {"text_input"})
        for shape in [(), (1,), (2, 1), (0, 1), (1, 1, 1), *([] if name in WORDS else [(1, 0), (1, 2)])]
    ],
)
def test_an_input_of_the_wrong_shape_is_refused(tokenizer: Tokenizer, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parser(tokenizer).parse({**raw(), name: np.zeros(shape, DTYPES[name])})
    expected = "number of words" if name in WORDS else "1"
    assert str(refused.value) == f"{name} has shape {list(shape)}; it must be [1, {expected}]"


@pytest.mark.parametrize("shape", [(), (1,), (1, 2), (1, 0), (0, 1), (0, 0), (1, 1, 1)])
def test_a_prompt_of_the_wrong_shape_is_refused(tokenizer: Tokenizer, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"^text_input has shape \[.*\]; it must be \["):
        parser(tokenizer).parse({"text_input": np.full(shape, b"def", np.object_)})


def test_an_empty_list_of_words_means_none(tokenizer: Tokenizer) -> None:
    (request,) = parser(tokenizer).parse({**raw(), "stop_words": np.zeros((1, 0), np.object_)})
    assert request.stop_words == ()
