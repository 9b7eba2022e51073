"""Fields that depend on the vocabulary or on each other, aliases, request parameters and `sampling_parameters`."""

import json
from dataclasses import replace

import pytest
from engine.parsing import parse, parse_rows, refusal
from llama_engine.engine.sequence_builder import choices_of
from llama_engine.errors import InvalidRequest
from llama_engine.sampling.draw import choice_seed
from llama_engine.text.tokenizer import Tokenizer, Vocabulary

KIND, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
WORDS, WEIGHTS = "embedding_bias_words", "embedding_bias_weights"
ONE_VALUE = "the field must have one value"
LONGEST_WORD, LONGEST_SALT = "é" * 512, "é" * 128


def test_prompts_of_tokens_are_taken_as_they_are_without_padding(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("def f")[1:]
    rows = parse_rows(tokenizer, input_ids=[[*tokens], [8, *[-1] * (len(tokens) - 1)]])
    assert [row.prompt_tokens for row in rows] == [tokens, (8,)]
    assert rows[0].prompt == "def f"


def test_the_completions_of_a_request_are_bounded_in_all_its_rows(tokenizer: Tokenizer) -> None:
    rows = parse_rows(tokenizer, text_input=["def f"] * 5, n=[16, 16, 16, 15, 1])
    assert [row.n for row in rows] == [16, 16, 16, 15, 1]
    with pytest.raises(InvalidRequest, match=r"num_return_sequences is 65 in all of the request; it must be at most"):
        parse_rows(tokenizer, text_input=["def f"] * 5, num_return_sequences=[16, 16, 16, 15, 2])
    # Rows of one completion are bounded by Triton's config alone.
    assert len(parse_rows(tokenizer, text_input=["def f"] * 65)) == 65


@pytest.mark.parametrize(("name", "count"), [("stop_words", 16), ("bad_words", 64)])
def test_words_on_their_bounds_are_accepted_without_empty_ones(tokenizer: Tokenizer, name: str, count: int) -> None:
    words = [*(f"w{index}" for index in range(count - 1)), LONGEST_WORD]
    request = parse(tokenizer, cache_salt=LONGEST_SALT, **{name: ["", *words, ""]})
    assert (getattr(request, name), request.cache_salt) == (tuple(word.encode() for word in words), LONGEST_SALT)
    assert getattr(parse(tokenizer, **{name: []}), name) == getattr(parse(tokenizer, **{name: [""]}), name) == ()


def test_a_top_p_of_zero_is_greedy(tokenizer: Tokenizer) -> None:
    request = parse(tokenizer, top_p=0.0, temperature=1.5)
    assert (request.temperature, request.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "first", "other", "second", "different"),
    [
        ("temperature", 0.1, "temperature", "0.1", "0.2"),
        ("seed", 7, "random_seed", "7", 8),
        ("stop_words", ["x"], "stop", "x", "y"),
        ("ignore_eos", True, "ignore_eos", "true", "maybe"),
        ("min_tokens", 3, "min_length", "3", 4),
    ],
)
def test_a_parameter_that_comes_twice_must_have_one_value(
    tokenizer: Tokenizer, name: str, first: object, other: str, second: object, different: object
) -> None:
    seed: dict[str, object] = {"seed": 7}
    assert parse(tokenizer, {other: second, **seed}, **{name: first}) == parse(tokenizer, seed, **{name: first})
    message = refusal(tokenizer, {other: different}, **{name: first})
    assert message.startswith(f"{name} is ")
    assert message.endswith(f"; {ONE_VALUE}")


def test_the_parameters_of_other_backends_change_no_other_one(tokenizer: Tokenizer) -> None:
    neutral = {"pad_id": -1, "beam_width": 1, "length_penalty": 2.0, "end_id": -1, "return_finish_reason": True}
    changed = parse(tokenizer, seed=1, **neutral)
    assert changed == replace(parse(tokenizer, seed=1), pad_id=-1, length_penalty=2.0)


def test_an_end_id_is_one_more_stop_token(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, end_id=7).stop_token_ids == (7,)
    assert parse(tokenizer, end_id=7, stop_token_ids=[5, 7]).stop_token_ids == (5, 7)


def test_a_words_bias_is_added_to_every_token_of_the_word(tokenizer: Tokenizer) -> None:
    words = ["return", "", " zebra", "return"]
    request = parse(tokenizer, logit_bias='{"1": 4}', **{WORDS: words, WEIGHTS: [2.0, 5.0, -3.0, 1.5]})
    expected = {1: 4.0}
    for word, weight in (("return", 3.5), (" zebra", -3.0)):
        for token in set(tokenizer.pretrained(word, add_special_tokens=False)["input_ids"]):
            expected[token] = expected.get(token, 0.0) + weight
    assert len(expected) > 3
    assert dict(request.logit_bias) == expected


def test_a_prediction_is_cut_to_max_tokens(tokenizer: Tokenizer) -> None:
    text = "".join(f" number {number}" for number in range(2000))
    tokens = tokenizer.encode_inside(text)
    assert [parse(tokenizer, max_tokens=count, prediction=text).prediction_tokens for count in (2, 9)] == [
        tokens[:2],
        tokens[:9],
    ]


def test_a_prediction_has_no_token_beyond_the_vocabulary(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode_inside("return x")
    smaller = replace(tokenizer, vocabulary=Vocabulary(tokenizer.vocabulary.token_bytes[: max(tokens)]))
    expected = tuple(token for token in tokens if token < max(tokens))
    assert parse(smaller, input_ids=[5], prediction="return x").prediction_tokens == expected


@pytest.mark.parametrize(("kind", "guide"), [("json", ""), ("json", '{"type": "array"}'), ("regex", "a" * 131_072)])
def test_the_type_json_needs_no_guide(tokenizer: Tokenizer, kind: str, guide: str) -> None:
    request = parse(tokenizer, **{KIND: kind, GUIDE: guide})
    assert (request.guided_decoding_guide_type, request.guided_decoding_guide) == (kind, guide)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": []}, "input_ids is empty; it must be a prompt of at least one token"),
        ({"input_ids": [5, 3072]}, "input_ids is a list with token 3072; it must be of tokens from 0 to 3071"),
        ({"input_ids": [5, -2]}, "input_ids is a list with -2; it must be a list of token ids"),
        ({"input_ids": [5] * 64}, "input_ids is 64 tokens; it must be at most 63 tokens (max_model_len - 1)"),
        ({"text_input": "d", "input_ids": [5]},
         "text_input and input_ids are both given; a request must have one of them"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens is 6; it must be a whole number, at least 0 and at most 5"),
        ({"stop_words": ["w"] * 17}, "stop_words is a value of 17 words; it must be at most 16"),
        ({"bad_words": ["w"] * 65}, "bad_words is a value of 65 words; it must be at most 64"),
        ({"bad_words": ["a", LONGEST_WORD + "."]}, "bad_words is a value of 1025 bytes in a word; it must be at most"),
        ({"cache_salt": LONGEST_SALT + "."}, "cache_salt is a text of 257 bytes; it must be at most 256 bytes"),
        ({"prediction": "x" * (2**20 + 1)},
         "prediction is a text of 1048577 bytes; it must be at most 1048576 bytes"),
        ({"seed": 7, "random_seed": 8}, f"seed is 7 and random_seed is 8; {ONE_VALUE}"),
        ({"beam_width": 2}, "beam_width is 2; it must be a whole number, at least 1 and at most 1"),
        ({"length_penalty": float("nan")}, "length_penalty is nan; it must be a finite number"),
        ({"end_id": 3072}, "end_id is 3072; it must be a token id, at most 3071, or -1 for none"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids is a value of 1025 ids; it must be at most 1024"),
        ({WEIGHTS: [1.0] * 1025}, f"{WEIGHTS} is a value of 1025 numbers; it must be at most 1024"),
        ({WORDS: ["x" * 1000] * 17},
         f"{WORDS} is a value of 17000 bytes in all words; it must be at most 16384"),
        ({WORDS: ["a", "b"], WEIGHTS: [1.0]},
         f"{WEIGHTS} is a list of 1 numbers; it must be as long as {WORDS}, which is a list of 2 words"),
        ({WORDS: ["a"], WEIGHTS: [101.0]}, f"{WEIGHTS} is a list with 101.0; it must be a list, each a finite number"),
        ({"logit_bias": "[]"}, "logit_bias is '[]'; it must be a JSON object"),
        ({"logit_bias": '{"x": 1}'}, "logit_bias is an object with 'x'; it must be a JSON object of at most 1024 "),
        ({"logit_bias": '{"3072": 1}'}, "logit_bias is a list with token 3072; it must be of tokens from 0 to 3071"),
        ({"logit_bias": json.dumps(dict.fromkeys(map(str, range(1025)), 1))},
         "logit_bias is a value of 1025 entries; it must be at most 1024"),
        ({"resume_ids": [5, 9999], "seed": 1}, "resume_ids is a list with token 9999; it must be of tokens from 0 to"),
        ({"resume_ids": [5, 6], "max_tokens": 2, "seed": 1},
         "resume_ids is a list of 2 tokens; it must be fewer than max_tokens, which is 2"),
        ({"resume_ids": [5], "n": 2, "seed": 1},
         "n is 2; it must be 1 beside resume_ids, which are the tokens of one completion"),
        # Sampled by the checkpoint's default temperature, too.
        ({"resume_ids": [5]},
         "seed is missing; it must be the interrupted request's beside resume_ids, if temperature is not 0"),
        # An empty guide or type is none.
        ({KIND: "yaml"}, f"{KIND} is 'yaml'; it must be one of json, json_schema, regex, ebnf_grammar, "),
        ({GUIDE: "a+"}, f"{KIND} is missing; it must be one of json, json_schema, regex, ebnf_grammar, "),
        ({KIND: "regex"}, f"{GUIDE} is missing; it must be given with {KIND} 'regex'"),
        ({KIND: "json", GUIDE: "[]"}, f"{GUIDE} is '[]'; it must be missing or a JSON object beside 'json'"),
        ({KIND: "json", GUIDE: "{"}, f"{GUIDE} is not JSON (Expecting property name enclosed in double quotes: "),
        ({KIND: "regex", GUIDE: "a" * 131_073}, f"{GUIDE} is a text of 131073 bytes; it must be at most 131072 bytes"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_its_bound(tokenizer: Tokenizer, values: dict[str, object], message: str) -> None:
    assert len(tokenizer.vocabulary.token_bytes) == 3072
    assert refusal(tokenizer, **values).startswith(message)


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"top_p": 0.0}, {"temperature": 1.0, "random_seed": 7}])
def test_only_a_sampled_request_is_resumed_with_its_seed(tokenizer: Tokenizer, values: dict[str, object]) -> None:
    assert parse(tokenizer, resume_ids=[5, 6, 7], **values).resume_ids == (5, 6, 7)


def test_request_parameters_are_inputs_of_the_same_name_in_every_row(tokenizer: Tokenizer) -> None:
    parameters: dict[str, object] = {
        "temperature": 0.25, "max_tokens": 3, "stop": "x", "ignore_eos": True, "seed": "7", "top_p": 1,
        "logit_bias": '{"5": -1}', "top_k": 10**30,
    }  # fmt: skip
    rows = parse_rows(tokenizer, parameters, text_input=["def f", "class"])
    assert len(rows) == 2
    for row in rows:
        assert (row.temperature, row.max_tokens, row.stop_words, row.ignore_eos) == (0.25, 3, (b"x",), True)
        assert (row.seed, row.top_p, row.logit_bias) == (7, 1.0, ((5, -1.0),))
        # No bound above: more than the vocabulary is all of it.
        assert row.top_k == 10**30


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temprature": 1.0}, "'temprature' is no input of this model, and so no request parameter (did you mean 'te"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number, at least 1"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a finite number, at least 0 and at most 2"),
        ({"stop_words": 5}, "stop_words is 5; it must be a list of words"),
    ],
)
def test_a_bad_request_parameter_is_refused_with_its_bound(
    tokenizer: Tokenizer, parameters: dict[str, object], message: str
) -> None:
    assert refusal(tokenizer, parameters).startswith(message)


def test_sampling_parameters_are_those_of_vllm(tokenizer: Tokenizer) -> None:
    parameters = {
        "n": 2, "temperature": "0.1", "top_p": "0.95", "max_tokens": "20", "top_k": -1, "min_p": 0.5,
        "stop": ["x", "y"], "logprobs": 3, "prompt_logprobs": 0, "stop_token_ids": [5], "logit_bias": {"6": 1.5},
        "seed": None, "ignore_eos": True,
    }  # fmt: skip
    # vLLM's own client gives some of them again as request parameters.
    request = parse(tokenizer, {"temperature": "0.1", "top_p": "0.95"}, sampling_parameters=json.dumps(parameters))
    assert (request.n, request.temperature, request.top_p, request.max_tokens) == (2, 0.1, 0.95, 20)
    assert (request.top_k, request.min_p, request.stop_words) == (0, 0.5, (b"x", b"y"))
    assert (request.num_logprobs, request.prompt_logprobs, request.stop_token_ids) == (3, 0, (5,))
    assert (request.logit_bias, request.ignore_eos) == (((6, 1.5),), True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text_input": "x"}', "'text_input' is no parameter that sampling_parameters may have"),
        ('{"min_length": 1}', f"min_tokens is 2 and min_length is 1; {ONE_VALUE}"),
        ('{"stop": ["\\ud800"]}', "stop is half a character at 0; it must be UTF-8 text"),
        ('{"seed": 1%s}' % ("0" * 5000), "sampling_parameters is not JSON ("),
        # At every depth, JSON that can still be parsed or shown, and JSON that can't.
        *((f'{{"stop": {"[" * depth}{"]" * depth}}}', "s") for depth in (2, 100, *range(600, 1100, 20), 5000)),
        ("", "sampling_parameters is not JSON ("),
        ("3", "sampling_parameters is '3'; it must be a JSON object"),
    ],
)  # fmt: skip
def test_bad_sampling_parameters_are_refused(tokenizer: Tokenizer, text: str, message: str) -> None:
    assert refusal(tokenizer, sampling_parameters=text, min_tokens=2).startswith(message)


def test_each_choice_has_a_seed_derived_from_the_requests(tokenizer: Tokenizer) -> None:
    choices = choices_of(parse(tokenizer, n=16, seed=7))
    assert [choice.choice for choice in choices] == list(range(16))
    seeds = [choice.seed for choice in choices]
    assert seeds == [choice_seed(7, choice) for choice in range(16)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 16
    assert choices_of(parse(tokenizer, seed=7)) == [parse(tokenizer, seed=7)]
