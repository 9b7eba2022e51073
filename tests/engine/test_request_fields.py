"""Fields that depend on the vocabulary or on each other, aliases, request parameters and `sampling_parameters`."""

import json
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import pytest
from llama_engine.api.compound_bounds import Numbers
from llama_engine.api.defaults import GenerationDefaults
from llama_engine.api.fields import ALIASES, FIELDS, SAMPLING_PARAMETERS
from llama_engine.api.request_parser import GenerationRequest, RequestParser
from llama_engine.errors import InvalidRequest
from llama_engine.sampling.philox import choice_seed
from llama_engine.text.tokenizer import Tokenizer
from numpy.typing import NDArray

MAX_MODEL_LEN = 64
DEFAULTS = GenerationDefaults(max_tokens=16, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25)
TYPES = {"STRING": np.object_, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}


def _tensor(name: str, rows: list[object]) -> NDArray[Any]:
    lists = [row if isinstance(row, list) else [row] for row in rows]
    encoded = [[item.encode() if isinstance(item, str) else item for item in row] for row in lists]
    dtype = TYPES[FIELDS[ALIASES.get(name, name)].type]
    return np.array(encoded, dtype=dtype).reshape(len(rows), -1)


def _rows(
    tokenizer: Tokenizer,
    parameters: dict[str, object] | None = None,
    truncates: bool = False,
    /,
    **inputs: list[object],
) -> list[GenerationRequest]:
    parser = RequestParser(tokenizer, DEFAULTS, MAX_MODEL_LEN, truncates)
    return parser.parse({name: _tensor(name, rows) for name, rows in inputs.items()}, parameters)


def _parse(
    tokenizer: Tokenizer, parameters: dict[str, object] | None = None, truncates: bool = False, /, **values: object
) -> GenerationRequest:
    """Parse a request of one row."""
    given = values if "input_ids" in values else {"text_input": "def f", **values}
    (request,) = _rows(tokenizer, parameters, truncates, **{name: [value] for name, value in given.items()})
    return request


def _refusal(tokenizer: Tokenizer, parameters: dict[str, object] | None = None, /, **values: object) -> str:
    with pytest.raises(InvalidRequest) as refused:
        _parse(tokenizer, parameters, **values)
    return str(refused.value)


def _vocabulary(tokenizer: Tokenizer) -> int:
    return len(tokenizer.vocabulary.token_bytes)


def test_a_prompt_of_tokens_is_taken_as_it_is(tokenizer: Tokenizer) -> None:
    tokens = list(tokenizer.encode("def f")[1:])
    request = _parse(tokenizer, input_ids=tokens)
    assert request.prompt_tokens == tuple(tokens)
    assert request.prompt == "def f"
    # Rows of unequal length are padded.
    rows = _rows(tokenizer, input_ids=[[5, 6, 7], [8, -1, -1]])
    assert [row.prompt_tokens for row in rows] == [(5, 6, 7), (8,)]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "is an empty list; it must be a list of at least one token"),
        ([-1, -1], "is an empty list; it must be a list of at least one token"),
        ([5, -2], "is a list with -2; it must be a list of token ids"),
        ([5, 3072], "is a list with token 3072; it must be of tokens from 0 to 3071"),
        ([5] * MAX_MODEL_LEN, "is 64 tokens; it must be at most 63 tokens (max_model_len - 1)"),
    ],
)
def test_a_prompt_of_tokens_is_bounded_in_length_and_by_the_vocabulary(
    tokenizer: Tokenizer, tokens: list[int], message: str
) -> None:
    assert _vocabulary(tokenizer) == 3072
    assert _refusal(tokenizer, input_ids=tokens) == f"input_ids {message}"


@pytest.mark.parametrize("name", ["input_ids", "stop_token_ids", "allowed_token_ids"])
def test_a_list_of_millions_of_ids_is_refused_before_its_ids_are_read(tokenizer: Tokenizer, name: str) -> None:
    class Unreadable(np.ndarray[Any, np.dtype[np.int32]]):
        def tolist(self) -> NoReturn:
            raise AssertionError

    values = np.zeros((1, 4_000_000), dtype=np.int32).view(Unreadable)
    prompt = {} if name == "input_ids" else {"text_input": _tensor("text_input", ["def f"])}
    with pytest.raises(InvalidRequest, match=rf"^{name} is .*4000000 .*; it must be at most "):
        RequestParser(tokenizer, DEFAULTS, MAX_MODEL_LEN).parse({**prompt, name: values})


@pytest.mark.parametrize("name", ["n", "num_return_sequences"])
def test_the_completions_of_a_request_are_bounded_in_all_its_rows(tokenizer: Tokenizer, name: str) -> None:
    counts: list[object] = [16, 16, 16, 15]
    rows = _rows(tokenizer, text_input=["def f"] * 5, **{name: [*counts, 1]})
    assert [row.n for row in rows] == [*counts, 1]
    with pytest.raises(InvalidRequest, match=f"^{name} is 65 in all of the request's rows; it must be at most 64 in"):
        _rows(tokenizer, text_input=["def f"] * 5, **{name: [*counts, 2]})
    # Rows of one completion are bounded by Triton's config alone.
    assert len(_rows(tokenizer, text_input=["def f"] * 65)) == 65


def test_a_value_is_parsed_once(tokenizer: Tokenizer) -> None:
    values = {"embedding_bias_words": ["a"], "embedding_bias_weights": [1.0], "end_id": 5}
    with patch.object(Numbers, "parse", autospec=True, side_effect=Numbers.parse) as parse:
        _parse(tokenizer, **values)
    assert parse.call_count == 1


def test_text_and_tokens_together_are_refused(tokenizer: Tokenizer) -> None:
    message = "text_input and input_ids are both given; a request must have one of them"
    assert _refusal(tokenizer, text_input="def f", input_ids=[5]) == message


def test_max_tokens_beyond_the_room_is_cut_where_the_server_or_the_request_says_so(tokenizer: Tokenizer) -> None:
    room = MAX_MODEL_LEN - len(tokenizer.encode("def f"))
    assert _parse(tokenizer, None, True, max_tokens=2000).max_tokens == room
    assert _parse(tokenizer, truncate_max_tokens=True, max_tokens=2000).max_tokens == room
    assert _parse(tokenizer, truncate_max_tokens=True, max_tokens=3).max_tokens == 3
    with pytest.raises(InvalidRequest, match=f"^max_tokens is 2000; it must be at most {room}: "):
        _parse(tokenizer, None, True, truncate_max_tokens=False, max_tokens=2000)


def test_a_top_p_of_zero_is_greedy(tokenizer: Tokenizer) -> None:
    request = _parse(tokenizer, top_p=0.0, temperature=1.5)
    assert (request.temperature, request.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(("alias", "value"), [("n", 3), ("seed", 2**64 - 1), ("min_tokens", 5), ("stop_words", ["x"])])
def test_an_alias_is_the_field(tokenizer: Tokenizer, alias: str, value: object) -> None:
    (other,) = (name for name, field in ALIASES.items() if field == alias)
    parsed = getattr(_parse(tokenizer, **{other: value}), alias)
    assert parsed == getattr(_parse(tokenizer, **{alias: value}), alias)


@pytest.mark.parametrize(
    ("name", "first", "other", "second", "different"),
    [
        ("temperature", 0.1, "temperature", "0.1", "0.2"),
        ("seed", 7, "random_seed", "7", 8),
        ("stop_words", ["x"], "stop", "x", "y"),
        ("ignore_eos", True, "ignore_eos", "true", False),
        ("text_input", "def g", "text_input", "def g", "def f"),
        ("min_tokens", 3, "min_length", "3", 4),
    ],
)
def test_a_field_may_be_given_twice_with_one_value_and_not_with_two(
    tokenizer: Tokenizer, name: str, first: object, other: str, second: object, different: object
) -> None:
    assert _parse(tokenizer, {other: second, "seed": 7}, **{name: first}) == _parse(
        tokenizer, {"seed": 7}, **{name: first}
    )
    message = _refusal(tokenizer, {other: different}, **{name: first})
    assert message.startswith(f"{name} is ")
    assert message.endswith("; the field must have one value")


def test_what_vllm_backends_client_sends_twice_has_one_value(tokenizer: Tokenizer) -> None:
    parameters: dict[str, object] = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "20"}
    request = _parse(tokenizer, parameters, sampling_parameters=json.dumps(parameters))
    assert (request.temperature, request.top_p, request.max_tokens) == (0.1, 0.95, 20)
    message = _refusal(tokenizer, parameters, sampling_parameters='{"top_p": "0.9"}')
    assert message == "top_p is '0.95' and top_p is '0.9'; the field must have one value"


def test_a_refusal_names_the_alias_that_was_given(tokenizer: Tokenizer) -> None:
    assert _refusal(tokenizer, min_length=-1) == "min_length is -1; it must be a whole number, at least 0"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("beam_width", 2, "is 2; it must be a whole number, at least 1 and at most 1"),
        ("length_penalty", float("nan"), "is nan; it must be a finite number"),
        ("end_id", 3072, "is 3072; it must be a token id, at most 3071, or -1 for none"),
        ("end_id", -2, "is -2; it must be a whole number, at least -1"),
        ("stop_token_ids", [1, 3072], "is a list with token 3072; it must be of tokens from 0 to 3071"),
        ("stop_token_ids", [5] * 1025, "is a list of 1025 ids; it must be at most 1024 ids"),
        ("allowed_token_ids", [-3], "is a list with -3; it must be a list of token ids"),
        ("allowed_token_ids", [5] * (2**18 + 1), "is a list of 262145 ids; it must be at most 262144 ids"),
        ("embedding_bias_weights", [1.0] * 1025, "is a list of 1025 numbers; it must be at most 1024 numbers"),
        (
            "embedding_bias_words", ["x" * 1000] * 17,
            "is a list of words of 17000 bytes together; it must be at most 16384 bytes",
        ),
        ("logit_bias", "[]", "is '[]'; it must be a JSON object"),
        ("logit_bias", "{", "is not JSON ("),
        ("logit_bias", "[" * 100_000, "is JSON of too many levels; it must be a JSON object"),
        ("logit_bias", '{"1": NaN}', "is not JSON (NaN is no JSON); it must be a JSON object"),
        ("logit_bias", " " * (1 << 20) + "{}", "is a text of 1048578 characters; it must be JSON of at most 1048576 "),
        ("logit_bias", '{"1": 1, "1": 2}', "is an object with '1' twice; it must be of different keys"),
        ("logit_bias", '{"01": 1}', "is an object with the key '01'; it must be of token ids"),
        ("logit_bias", '{"x": 1}', "is an object with the key 'x'; it must be of token ids"),
        ("logit_bias", '{"1": "\\ud800"}', "is an object with '\\ud800' for 1; it must be of numbers, each a finite"),
        ("logit_bias", '{"3072": 1}', "is a list with token 3072; it must be of tokens from 0 to 3071"),
        (
            "logit_bias", '{"1": 100.5}',
            "is an object with 100.5 for 1; it must be of numbers, each a finite number, at least -100 and at most 100",
        ),
        ("guided_decoding_guide_type", "yaml", "is 'yaml'; it must be one of json, json_schema, regex, ebnf_grammar, "),
    ],
)  # fmt: skip
def test_a_value_beyond_a_bound_of_its_own_is_refused_by_name_value_and_bound(
    tokenizer: Tokenizer, name: str, value: object, message: str
) -> None:
    assert _refusal(tokenizer, **{name: value}).startswith(f"{name} {message}")


@pytest.mark.parametrize("name", [*FIELDS, *ALIASES])
def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_field(tokenizer: Tokenizer, name: str) -> None:
    for wrong in ({"a": 1}, [[1]], None):
        message = _refusal(tokenizer, {name: wrong})
        assert message.startswith(f"{name} is "), message
        assert "must " in message


def test_more_biases_than_the_bound_are_refused(tokenizer: Tokenizer) -> None:
    biases = {str(token): 1 for token in range(1025)}
    message = _refusal(tokenizer, logit_bias=json.dumps(biases))
    assert message == "logit_bias is an object of 1025 entries; it must be at most 1024 entries"


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        ("", "a+", "guided_decoding_guide_type is missing; it must be one of json, json_schema, regex, ebnf_grammar, "),
        ("regex", "", "guided_decoding_guide is missing; it must be given with guided_decoding_guide_type 'regex'"),
        ("json", "[]", "guided_decoding_guide is '[]'; it must be missing or a JSON object beside 'json'"),
        ("json", "{", "guided_decoding_guide is not JSON (Expecting property name enclosed in double quotes at "),
        ("regex", "a" * 131_073, "guided_decoding_guide is a text of 131073 bytes; it must be at most 131072 bytes"),
    ],
)
def test_a_guide_without_its_type_or_a_type_without_its_guide_is_refused(
    tokenizer: Tokenizer, kind: str, guide: str, message: str
) -> None:
    given = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    assert _refusal(tokenizer, **{name: value for name, value in given.items() if value}).startswith(message)
    # An empty one is none.
    assert _refusal(tokenizer, **given).startswith(message)


@pytest.mark.parametrize(
    ("kind", "guide"), [("", ""), ("json", ""), ("json", '{"type": "array"}'), ("regex", "a" * 131_072)]
)
def test_the_type_json_needs_no_guide_and_two_empty_ones_are_none(tokenizer: Tokenizer, kind: str, guide: str) -> None:
    request = _parse(tokenizer, guided_decoding_guide_type=kind, guided_decoding_guide=guide)
    assert (request.guided_decoding_guide_type, request.guided_decoding_guide) == (kind, guide)
    assert _parse(tokenizer, guided_decoding_guide_type="json").guided_decoding_guide == ""


def test_the_fields_of_other_backends_have_no_effect(tokenizer: Tokenizer) -> None:
    plain = _parse(tokenizer, seed=1)
    neutral = {"pad_id": -1, "beam_width": 1, "length_penalty": 2.0, "end_id": -1, "return_finish_reason": True}
    assert _parse(tokenizer, seed=1, **neutral) == plain


def test_an_end_id_is_one_more_stop_token(tokenizer: Tokenizer) -> None:
    assert _parse(tokenizer, end_id=7).stop_token_ids == (7,)
    assert _parse(tokenizer, end_id=7, stop_token_ids=[5, 7]).stop_token_ids == (5, 7)


def test_a_words_bias_is_added_to_every_token_of_the_word(tokenizer: Tokenizer) -> None:
    words = ["return", "", " zebra"]
    request = _parse(
        tokenizer, embedding_bias_words=words, embedding_bias_weights=[2.0, 5.0, -3.0], logit_bias='{"1": 4}'
    )
    expected = {1: 4.0}
    for word, weight in (("return", 2.0), (" zebra", -3.0)):
        for token in set(tokenizer.pretrained(word, add_special_tokens=False)["input_ids"]):
            expected[token] = expected.get(token, 0.0) + weight
    assert len(expected) > 3
    assert dict(request.logit_bias) == expected


@pytest.mark.parametrize(
    ("words", "weights", "message"),
    [
        (["a", "b"], [1.0], "is a list of 1 numbers; it must be as long as embedding_bias_words, which is a list of 2"),
        ([], [1.0], "is a list of 1 numbers; it must be as long as embedding_bias_words, which is a list of 0 words"),
        (["a"], [101.0], "is a list with 101.0; it must be a list, each a finite number, at least -100 and at most "),
        (["a"], [float("inf")], "is a list with inf; it must be a list, each a finite number, at least -100 and at "),
    ],
)  # fmt: skip
def test_biases_of_words_are_bounded_and_as_many_as_the_words(
    tokenizer: Tokenizer, words: list[str], weights: list[float], message: str
) -> None:
    refusal = _refusal(tokenizer, embedding_bias_words=words, embedding_bias_weights=weights)
    assert refusal.startswith(f"embedding_bias_weights {message}")


def test_request_parameters_are_inputs_of_the_same_name_in_every_row(tokenizer: Tokenizer) -> None:
    parameters: dict[str, object] = {
        "temperature": 0.25, "max_tokens": 3, "stop": "x", "ignore_eos": True, "seed": "7", "top_p": 1,
        "logit_bias": '{"5": -1}',
    }  # fmt: skip
    rows = _rows(tokenizer, parameters, text_input=["def f", "class"])
    assert len(rows) == 2
    for row in rows:
        assert (row.temperature, row.max_tokens, row.stop_words, row.ignore_eos) == (0.25, 3, (b"x",), True)
        assert (row.seed, row.top_p, row.logit_bias) == (7, 1.0, ((5, -1.0),))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temprature": 1.0}, "'temprature' is no input of this model, and so no request parameter (did you mean 'te"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number, at least 1"),
        ({"max_tokens": True}, "max_tokens is True; it must be a whole number, at least 1"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a finite number, at least 0 and at most 2"),
        ({"temperature": "1_0"}, "temperature is '1_0'; it must be a finite number, at least 0 and at most 2"),
        ({"stop_words": 5}, "stop_words is 5; it must be a list of words"),
        ({"stop_token_ids": "5"}, "stop_token_ids is '5'; it must be a list of token ids"),
        ({"text_input": "def g"}, "text_input is b'def f' and text_input is 'def g'; the field must have one value"),
        ({"top_k": 10**30}, None),
    ],
)  # fmt: skip
def test_a_bad_request_parameter_is_refused_by_name_value_and_bound(
    tokenizer: Tokenizer, parameters: dict[str, object], message: str | None
) -> None:
    if message is None:
        # No bound above: more than the vocabulary is all of it.
        assert _parse(tokenizer, parameters).top_k == 10**30
    else:
        assert _refusal(tokenizer, parameters).startswith(message)


def test_an_input_and_a_request_parameter_that_differ_are_refused(tokenizer: Tokenizer) -> None:
    message = _refusal(tokenizer, {"seed": 1}, random_seed=2)
    assert message == "random_seed is 2 and seed is 1; the field must have one value"


def test_sampling_parameters_are_those_of_vllm(tokenizer: Tokenizer) -> None:
    parameters = {
        "n": 2, "temperature": "0.1", "top_p": "0.95", "max_tokens": "20", "top_k": -1, "min_p": 0.5,
        "stop": ["x", "y"], "logprobs": 3, "prompt_logprobs": 0, "stop_token_ids": [5], "logit_bias": {"6": 1.5},
        "seed": None, "ignore_eos": True,
    }  # fmt: skip
    request = _parse(tokenizer, sampling_parameters=json.dumps(parameters))
    assert (request.n, request.temperature, request.top_p, request.max_tokens) == (2, 0.1, 0.95, 20)
    assert (request.top_k, request.min_p, request.stop_words) == (0, 0.5, (b"x", b"y"))
    assert (request.num_logprobs, request.prompt_logprobs, request.stop_token_ids) == (3, 0, (5,))
    assert (request.logit_bias, request.ignore_eos) == (((6, 1.5),), True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"best_of": 2}', "'best_of' is no parameter that sampling_parameters may have"),
        ('{"text_input": "x"}', "'text_input' is no parameter that sampling_parameters may have"),
        ('{"sampling_parameters": "{}"}', "'sampling_parameters' is no parameter that sampling_parameters may have"),
        ('{"stop": "x", "stop_words": "y"}', "stop is 'x' and stop_words is 'y'; the field must have one value"),
        ('{"temperature": 3}', "temperature is 3; it must be a finite number, at least 0 and at most 2"),
        ('{"stop": [1]}', "stop is 1; it must be a text"),
        ('{"stop_token_ids": [null, false]}', "stop_token_ids is a list with None; it must be a list of token ids"),
        ('{"stop": ["\\ud800"]}', "stop is half a character at 0; it must be UTF-8 text"),
        ('{"seed": 1%s}' % ("0" * 5000), "sampling_parameters is not JSON ("),
        # At every depth, JSON that can still be parsed or shown, and JSON that can't.
        *((f'{{"stop": {"[" * depth}{"]" * depth}}}', "s") for depth in (2, 100, *range(600, 1100, 20), 5000)),
        ("", "sampling_parameters is not JSON ("),
        ("3", "sampling_parameters is '3'; it must be a JSON object"),
    ],
)  # fmt: skip
def test_bad_sampling_parameters_are_refused(tokenizer: Tokenizer, text: str, message: str) -> None:
    assert _refusal(tokenizer, sampling_parameters=text).startswith(message)


def test_a_field_that_differs_in_sampling_parameters_and_outside_is_refused(tokenizer: Tokenizer) -> None:
    message = _refusal(tokenizer, sampling_parameters='{"logprobs": 1}', num_logprobs=2)
    assert message == "num_logprobs is 2 and logprobs is 1; the field must have one value"


def test_sampling_parameters_may_have_every_field_but_the_prompt(tokenizer: Tokenizer) -> None:
    prompts = {"text_input", "input_ids", "stream", "sampling_parameters"}
    assert set(SAMPLING_PARAMETERS) == {*FIELDS, *ALIASES, "logprobs"} - prompts


def test_a_bad_row_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^row 1: min_p is 2\.0; it must be "):
        _rows(tokenizer, text_input=["def f"] * 2, min_p=[0.5, 2.0])
    with pytest.raises(InvalidRequest, match=r"^row 1: 'x' is no parameter that "):
        _rows(tokenizer, text_input=["def f"] * 2, sampling_parameters=["{}", '{"x": 1}'])


def test_choices_differ_in_their_seeds_only_and_the_first_has_the_requests_own(tokenizer: Tokenizer) -> None:
    request = _parse(tokenizer, n=16, seed=7)
    choices = request.choices()
    assert [choice.choice for choice in choices] == list(range(16))
    seeds = [choice.seed for choice in choices]
    assert seeds == [choice_seed(7, choice) for choice in range(16)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert _parse(tokenizer, seed=7).choices() == [_parse(tokenizer, seed=7)]
