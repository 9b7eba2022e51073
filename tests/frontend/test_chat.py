"""/v1/chat/completions without a stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from frontend.descriptions import CONTEXT, changed
from frontend.endpoints import Endpoint, Json, check_refusal, endpoint, error_of
from frontend.fake_triton import FakeTriton
from httpx import Response
from triton_llama.completion import Chunk
from triton_llama_openai.output.answers import stop_reason

STRUCTURAL_TAG = {"type": "structural_tag", "triggers": ["a"]}
FLAT_SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}


def test_a_chat_is_answered_in_openais_form(served: Endpoint, triton: FakeTriton) -> None:
    triton.cached_tokens = 2
    response = served.chat()
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "pydoc-llama"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["system_fingerprint"].startswith("fp_")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": " Hello, world.", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert answer["prompt_logprobs"] is None
    assert "timings" not in answer
    # An answer that isn't streamed comes in few responses.
    assert triton.last.value("stream_interval_ms") == 1000
    assert answer["usage"] == {
        "prompt_tokens": triton.last.prompt_tokens,
        "completion_tokens": 4,
        "total_tokens": triton.last.prompt_tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_the_prompt_is_the_checkpoints_chat_template(served: Endpoint, triton: FakeTriton) -> None:
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    assert served.chat(messages=messages).status_code == 200
    assert triton.prompt == (
        "<s>[INST] <<SYS>>\nBe short.\n<</SYS>>\n\none\ntwo [/INST] three </s><s>[INST] four [/INST]"
    )


def test_max_tokens_bounds_the_answer_under_either_name(served: Endpoint, triton: FakeTriton) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        (choice,) = served.chat(**{field: 2}).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (" Hello,", "length")
        assert triton.last.value("max_tokens") == 2
        assert "truncate_max_tokens" not in triton.last.inputs


Row = tuple[str, object, str, list[object]]
FIELDS: list[Row] = [
    ("top_p", 0, "top_p", [0.0]),
    ("top_k", -1, "top_k", [0]),
    ("seed", -1, "seed", [2**64 - 1]),
    ("stop", "x", "stop_words", ["x"]),
    ("stop", ["x", "yz"], "stop_words", ["x", "yz"]),
    ("logit_bias", {"5": -100}, "logit_bias", ['{"5": -100.0}']),
    ("guided_regex", "a+", "guided_decoding_guide", ["a+"]),
    ("guided_regex", "a+", "guided_decoding_guide_type", ["regex"]),
    ("guided_choice", ["a", 'b"'], "guided_decoding_guide", ['root ::= "a" | "b\\""']),
    ("guided_grammar", "root ::= x", "guided_decoding_guide_type", ["ebnf_grammar"]),
    ("response_format", {"type": "json_object"}, "guided_decoding_guide_type", ["json"]),
    ("response_format", STRUCTURAL_TAG, "guided_decoding_guide", ['{"type":"structural_tag","triggers":["a"]}']),
    ("structured_outputs", {"choice": ["a"]}, "guided_decoding_guide", ['root ::= "a"']),
    ("structured_outputs", {"json_object": True}, "guided_decoding_guide_type", ["json"]),
    ("structured_outputs", {"structural_tag": "{}"}, "guided_decoding_guide_type", ["structural_tag"]),
    ("prediction", {"type": "content", "content": [{"type": "text", "text": "a"}] * 2}, "prediction", ["a\na"]),
]
RESPONSE_FIELDS: list[Row] = [
    ("max_output_tokens", 7, "max_tokens", [7]),
    ("top_k", 5, "top_k", [5]),
    ("include", ["message.output_text.logprobs"], "num_logprobs", [0]),
    ("text", {"format": {"type": "text"}, "verbosity": "low"}, "stream", [True]),
    ("text", {"format": {"type": "json_object"}}, "guided_decoding_guide_type", ["json"]),
    ("text", {"format": FLAT_SCHEMA}, "guided_decoding_guide", ['{"type":"object"}']),
    ("structured_outputs", {"regex": "b"}, "guided_decoding_guide", ["b"]),
]


@pytest.mark.parametrize(
    ("ask", "row"),
    [*((Endpoint.chat, row) for row in FIELDS), *((Endpoint.respond, row) for row in RESPONSE_FIELDS)],
)
def test_a_field_reaches_the_model_as_its_input(
    served: Endpoint, triton: FakeTriton, ask: Callable[..., Response], row: Row
) -> None:
    field, value, name, inputs = row
    response = ask(served, **{field: value})
    assert response.status_code == 200, response.text
    assert triton.last.inputs[name] == inputs


def test_a_field_of_an_inputs_name_reaches_it(served: Endpoint, triton: FakeTriton) -> None:
    sampling = {"temperature": 0.5, "min_p": 0.25, "frequency_penalty": -2, "presence_penalty": 1.5, "ignore_eos": True}
    tokens = {"bad_words": ["no"], "stop_token_ids": [5, 6], "allowed_token_ids": [7, 8]}
    values = {**sampling, "priority": -3, "min_tokens": 1}
    assert served.chat(**values, **tokens).status_code == 200
    assert {name: triton.last.value(name) for name in values} == values
    assert {name: triton.last.inputs[name] for name in tokens} == tokens


def test_a_field_that_is_null_or_missing_is_no_input_but_for_the_seed(served: Endpoint, triton: FakeTriton) -> None:
    names = ("temperature", "stop", "tools", "logit_bias", "seed", "prediction")
    assert served.chat(**dict.fromkeys(names)).status_code == 200
    expected = {"text_input", "description_digest", "max_tokens", "truncate_max_tokens", "return_output_ids"}
    assert set(triton.last.inputs) == {*expected, "stream", "stream_interval_ms", "seed"}
    # The answer may fill the context.
    assert triton.last.integer("max_tokens", 0) > CONTEXT
    assert triton.last.value("truncate_max_tokens") is True


@pytest.mark.parametrize(("defaults", "expected"), [(["top_p"], [1.0]), (["temperature"], None)])
def test_the_temperature_is_the_checkpoints_else_openais(
    triton: FakeTriton, defaults: list[str], expected: list[float] | None
) -> None:
    triton.models["other"] = changed(checkpoint_defaults=defaults)
    with endpoint(triton.port, triton_model="other", served_name="pydoc-llama") as served:
        for ask in (Endpoint.chat, Endpoint.complete, Endpoint.respond):
            ask(served)
            assert triton.last.inputs.get("temperature") == expected
        served.chat(temperature=0)
    assert triton.last.inputs["temperature"] == [0.0]


def test_the_prompt_of_several_choices_counts_once(served: Endpoint, triton: FakeTriton) -> None:
    triton.cached_tokens = 2
    usage = served.chat(n=3).json()["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens"] == triton.last.prompt_tokens
    # Those that the first choice found.
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert len(triton.requests) == 1


def test_a_stop_string_is_the_stop_reason_and_a_stop_token_its_number(served: Endpoint) -> None:
    (choice,) = served.chat(stop=[" world"]).json()["choices"]
    assert choice["message"]["content"] == " Hello,"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " world")
    chunk = Chunk("a", "stop", 1, 1, stop_reason="17")
    assert (stop_reason(chunk, ["x"]), stop_reason(chunk, ["17"])) == (17, "17")


def test_logprobs_have_each_token_with_its_likeliest_alternatives(served: Endpoint) -> None:
    (choice,) = served.chat(logprobs=True, top_logprobs=2).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [" Hello", ",", " world", "."]
    assert content[0]["bytes"] == list(b" Hello")
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -1.5]
    (choice,) = served.chat(logprobs=True).json()["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], [], []]
    (choice,) = served.chat(top_logprobs=0).json()["choices"]
    assert choice["logprobs"] is None
    by_id = served.chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True).json()["choices"][0]
    first = by_id["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("token_id:0", list(b" Hello"))
    assert [entry["token"] for entry in first["top_logprobs"]] == ["token_id:0", "token_id:1"]


def test_prompt_logprobs_are_those_of_the_model(served: Endpoint) -> None:
    (choice,) = served.complete(prompt_logprobs=1).json()["choices"]
    for first, second, *_ in (served.chat(prompt_logprobs=1).json()["prompt_logprobs"], choice["prompt_logprobs"]):
        assert first is None
        assert second["0"]["logprob"] == -0.5


def test_a_request_id_is_the_clients_own_or_a_new_one(served: Endpoint, triton: FakeTriton) -> None:
    fields = {"model": "pydoc-llama", "messages": [{"role": "user", "content": "a"}]}
    response = served.http.post("/v1/chat/completions", json=fields, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1" == triton.last.id
    assert served.chat().headers["x-request-id"] == triton.last.id != "mine-1"


def test_variables_of_the_request_reach_the_template(triton: FakeTriton, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }} {{ documents[0].text }} {{ city }}")
    variables: Json = {"documents": [{"text": "Bonn"}], "chat_template_kwargs": {"city": "Köln"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with endpoint(triton.port, chat_template=template) as served:
        assert served.chat(messages=messages, **variables).status_code == 200
        assert triton.prompt == "a Bonn Köln"
        # This template hides the message.
        response = served.chat(messages=messages, continue_final_message=True, **variables)
    check_refusal(response, "continue_final_message", "doesn't show the last message")


def test_a_chat_without_a_template_is_refused(triton: FakeTriton) -> None:
    triton.models["untaught"] = changed(chat_templates={})
    with endpoint(triton.port, triton_model="untaught") as served:
        error = error_of(served.chat())
    assert (error["param"], error["code"]) == (None, "no_chat_template")
