"""/v1/responses without a stream: the object, its items, what its request's fields do, refusals."""

from __future__ import annotations

from frontend.client_types import read_response
from frontend.endpoints import Endpoint, Json, error_of
from frontend.fake_triton import FakeTriton
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem

ADD: Json = {
    "type": "function",
    "name": "add",
    "description": None,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
CLOCK: Json = {"type": "function", "name": "clock", "parameters": None, "strict": None}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
USER: Json = {"role": "user", "content": "a"}
SCHEMA: Json = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
LOGPROBS = ["message.output_text.logprobs"]


def _call(call_id: str, arguments: str = "{}") -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments}


def _result(call_id: str, output: object) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_a_response_is_openais_object(served: Endpoint, triton: FakeTriton) -> None:
    triton.cached_tokens = 2
    response = read_response(served.respond().json())
    assert response.id.startswith("resp_")
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.status, response.output_text) == ("completed", " Hello, world.")
    assert response.usage is not None
    assert response.usage.model_dump(exclude_none=True) == {
        "input_tokens": triton.last.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": triton.last.prompt_tokens + 4,
    }


def test_a_response_repeats_its_request(served: Endpoint) -> None:
    choice = {"type": "function", "name": "add"}
    fields: Json = {
        "instructions": "Be short.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.25,
        "tools": [ADD],
        "tool_choice": choice,
        "user": "me",
        "reasoning": {"effort": "low", "summary": None},
    }
    body = served.respond(**fields).json()
    read_response(body)
    assert {name: body[name] for name in fields} == fields
    schema = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True, "description": None}
    assert served.respond(text={"format": schema}).json()["text"] == {"format": schema}


def test_instructions_and_messages_in_every_form_are_the_prompt(served: Endpoint, triton: FakeTriton) -> None:
    part = {"type": "output_text", "text": "three", "annotations": [], "logprobs": [], "parsed": {"a": 1}}
    answer = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": None}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("one", "two")]},
        {**answer, "content": [part]},
        {"role": "user", "content": "four"},
    ]
    response = served.respond(input=items, instructions="Be short.")
    assert response.status_code == 200, response.text
    assert triton.prompt == (
        "<s>[INST] <<SYS>>\nBe short.\n<</SYS>>\n\none\ntwo [/INST] three </s><s>[INST] four [/INST]"
    )
    ignored = response.headers["x-ignored-parameters"].split(", ")
    assert ignored == [
        f"input.{name}" for name in ("content.annotations", "content.logprobs", "content.parsed", "id", "status")
    ]


def test_the_items_of_an_answer_are_one_message(served: Endpoint, triton: FakeTriton) -> None:
    items = [USER, {"role": "assistant", "content": "I add."}, _call("1", '{"a": 1}'), _call("2", '{"a": 2}')]
    results = [_result("2", "3"), _result("1", [{"type": "input_text", "text": "2"}])]
    # These fields have the endpoint's own behaviour.
    fields = {"store": False, "background": False, "truncation": "disabled", "tool_choice": "auto"}
    response = served.respond(input=[*items, *results], tools=[ADD], **fields)
    assert response.status_code == 200, response.text
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>' for number in (1, 2)]
    assert f"[/INST] I add.\n{calls[0]}\n{calls[1]} </s>" in triton.prompt
    assert "<tool_response>\n3\n</tool_response>\n<tool_response>\n2\n</tool_response>" in triton.prompt


def test_an_answer_can_be_sent_back_as_it_came(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["I add. ", CALL]
    output = read_response(served.respond(tools=[ADD]).json()).output
    call = output[1]
    assert isinstance(call, ResponseFunctionToolCall)
    # With every field that the library knows and the endpoint doesn't, null.
    items = [USER, *(item.model_dump(by_alias=True) for item in output), _result(call.call_id, "2")]
    response = served.respond(input=items, tools=[ADD])
    assert response.status_code == 200, response.text
    assert "I add. \n<tool_call>" in triton.prompt


def test_logprobs_are_in_the_message_where_included(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = [" Hello", "\ufffd"]
    response = read_response(served.respond(include=LOGPROBS, top_logprobs=2).json())
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    logprobs = message.content[0].model_dump()["logprobs"]
    assert [(entry["token"], entry["bytes"]) for entry in logprobs] == [(" Hello", list(b" Hello")), ("\ufffd", [0xC3])]
    assert [entry["logprob"] for entry in logprobs[0]["top_logprobs"]] == [-0.5, -1.5]


def test_an_answer_that_is_cut_off_is_incomplete_but_for_a_call_before(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = [CALL, CALL[:12], "more"]
    response = read_response(served.respond(tools=[ADD], max_output_tokens=2).json())
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.model_dump()["status"] for item in response.output] == ["completed", "incomplete"]
    assert (response.output_text, response.completed_at) == (CALL[:12], None)


def test_allowed_tools_leave_the_others_out(served: Endpoint, triton: FakeTriton) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    response = served.respond(tools=[ADD, CLOCK], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert "add" not in triton.prompt
    schema = triton.guide
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"const": "clock"}]


def test_reasoning_is_an_item_before_the_message(qwen3: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["<th", "ink>", "\nA sum.", "\n</think>", "\n\n4"]
    response = read_response(qwen3.respond().json())
    thought, message = response.output
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.model_dump()["content"] == [{"type": "reasoning_text", "text": "A sum."}]
    assert response.output_text == "4"
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens <= 5
    items = [USER, thought.model_dump(), message.model_dump(), _call("1"), _result("1", "4")]
    assert qwen3.respond(input=items).status_code == 200
    assert "<think>\nA sum.\n</think>\n\n4" in triton.prompt


def test_no_response_is_stored(served: Endpoint) -> None:
    for method, path in (("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel")):
        response = served.http.request(method, f"/v1/responses/{path}")
        assert (response.status_code, error_of(response)["code"]) == (404, "response_not_found")
