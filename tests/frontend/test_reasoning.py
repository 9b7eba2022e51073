"""Reasoning: found in any chunks of a text, and kept apart from content and calls in answers and streams."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from frontend.endpoints import QUESTION, Endpoint, Json, Serve, endpoint, events_of
from frontend.fake_triton import FakeTriton
from frontend.model_messages import ModelRequest
from llama_engine.guides.matcher import GuideMatchers
from triton_llama.completion import Chunk
from triton_llama_openai.output.output_parser import (
    Markers,
    OutputParser,
    OutputPart,
    Reasoning,
    find_markers,
    is_open,
)
from triton_llama_openai.output.tool_calls import HermesReader, ToolCall

THINK = ("<think>", "</think>")
SEED = ("<seed:think>", "</seed:think>")
GRANITE = (*THINK, "<response>", "</response>")
PHRASES = ("Here is my thought process:", "Here is my response:")
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
ADD: Json = {"type": "function", "function": {"name": "add"}}


def _parse(parser: OutputParser, text: str, finish_reason: str = "") -> list[OutputPart]:
    """Return the parts of one chunk."""
    return parser.parse(Chunk(text, finish_reason, 1, 1))


def _read(parser: OutputParser, chunks: Iterable[str]) -> tuple[str, str]:
    """Return reasoning and content."""
    parts = [*(part for chunk in chunks for part in _parse(parser, chunk)), *_parse(parser, "", "stop")]
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return reasoning, "".join(part for part in parts if isinstance(part, str))


CASES: list[tuple[Markers, bool, str, tuple[str, str]]] = [
    (THINK, False, "<think>\nA sum.\n\nEasy.\n</think>\n\nIt is 4.\n", ("A sum.\n\nEasy.", "It is 4.\n")),
    (THINK, False, "<think>\n\n</think>\n\nIt is 4.", ("", "It is 4.")),
    (THINK, False, "<think>\nA s", ("A s", "")),
    (THINK, False, "<think>a < b </thin", ("a < b </thin", "")),
    (THINK, False, "  It is <think>4</think>.", ("", "  It is <think>4</think>.")),
    (THINK, False, "", ("", "")),
    (THINK, True, "A sum.\n</think>\n\nIt is 4.", ("A sum.", "It is 4.")),
    (PHRASES, False, f"{PHRASES[0]}\n\nA sum.\n\n{PHRASES[1]}\n\nIt is 4.", ("A sum.", "It is 4.")),
    (GRANITE, False, "<think>a</think>\n<response>\nIt is 4.\n</response>", ("a", "It is 4.")),
]


@pytest.mark.parametrize(("markers", "begun", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_chunks_are_split_as_the_whole_text(
    markers: Markers, begun: bool, text: str, expected: tuple[str, str]
) -> None:
    assert _read(OutputParser(markers, begun=begun), text) == expected
    for cut in range(len(text) + 1):
        assert _read(OutputParser(markers, begun=begun), [text[:cut], text[cut:]]) == expected


def test_a_call_within_reasoning_is_none_and_one_after_it_is() -> None:
    parser = OutputParser(THINK, HermesReader(["add"]))
    first, call = _parse(parser, f"<think>{CALL}</think>\n{CALL}")
    assert first == Reasoning(CALL)
    assert isinstance(call, ToolCall)


def test_markers_are_found_in_the_template_or_among_the_tokens() -> None:
    assert find_markers("{{ content.split('</think>')[-1] }}", lambda _: False) == THINK
    assert find_markers("{{ messages }}", {"</seed:think>"}.__contains__) == SEED
    assert find_markers("<|im_start|>assistant\\n<think>", lambda _: False) == THINK
    assert find_markers(" and ".join(PHRASES), lambda _: False) == PHRASES
    assert find_markers("{{ messages }}", lambda _: False) is None
    # A prompt is open if the template has written the start.
    assert is_open(SEED, "assistant\n<seed:think><seed:cot_budget_reflect>")
    assert not is_open(THINK, "<|User|>What is <think>?<|Assistant|>")


@pytest.fixture
def distilled(serve: Serve) -> Endpoint:
    return serve("deepseek-r1-distill-llama")


def test_an_answer_has_its_reasoning_if_any_under_both_names(qwen3: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["<th", "ink>", "\nA sum.", "\n</think>", "\n\n4"]
    for choice in qwen3.chat(n=2).json()["choices"]:
        message = choice["message"]
        assert message["content"] == "4"
        assert message["reasoning_content"] == message["reasoning"] == "A sum."
        assert choice["finish_reason"] == "stop"
    triton.tokens = ["4"]
    assert qwen3.chat().json()["choices"][0]["message"].keys() == {"role", "content", "refusal"}


def test_the_usage_has_all_choices_tokens_of_reasoning_and_drafts(qwen3: Endpoint, triton: FakeTriton) -> None:
    triton.tokens, triton.draft_tokens = list("<think>\nA sum.\n</think>\n\n4"), (2, 1)
    usage = qwen3.chat(n=2).json()["usage"]
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 2 * len(qwen3.tokenize(prompt="A sum.", add_special_tokens=False)),
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 2,
    }


def test_a_stream_has_reasoning_then_content_then_calls(qwen3: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["<th", "ink>\nA", " sum.\n</th", "ink>\n\nI add. ", CALL]
    events = events_of(qwen3.chat(stream=True, tools=[ADD], logprobs=True))
    choices = [choice for event in events for choice in event["choices"]]  # type: ignore[attr-defined]  # JSON
    deltas = [choice["delta"] for choice in choices[1:-1]]
    assert [delta.get("reasoning_content") for delta in deltas] == ["A", " sum.", None, None]
    assert [delta.get("reasoning") for delta in deltas] == ["A", " sum.", None, None]
    assert deltas[2] == {"content": "I add. "}
    (call,) = deltas[3]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"index": 0, "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert choices[-1]["finish_reason"] == "tool_calls"
    tokens = [entry["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert tokens == triton.tokens


@cache
def _matchers() -> GuideMatchers:
    return GuideMatchers([*(bytes([byte]) for byte in range(256)), b"</s>"], [256], [256])


def _conforms(request: ModelRequest, text: str) -> bool:
    """Return whether a text conforms to a request's guide, as the engine reads it."""
    guide, kind = request.value("guided_decoding_guide"), request.value("guided_decoding_guide_type")
    state = _matchers().start(_matchers().check(str(kind), str(guide)))
    return all(map(state.accept, text.encode())) and state.may_end


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[]"),
        ({"guided_json": {"type": "integer"}}, "4", "four"),
        # Where what the guide allows could also be the marker and the reasoning.
        ({"guided_regex": r"[^0-9\n]+[0-9]"}, "is 4", "four"),
        ({"guided_choice": [" yes", ' n"o\n']}, ' n"o\n', "no"),
        ({"guided_grammar": 'root ::= "a" root | "b"'}, "aab", "aac"),
        ({"tools": [ADD], "tool_choice": "required"}, '[{"name": "add", "parameters": {}}]', "[]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_guide_holds_after_the_reasoning(
    qwen3: Endpoint, distilled: Endpoint, triton: FakeTriton, fields: Json, good: str, bad: str
) -> None:
    thought = "A {sum}\nof 2.\n</think>"
    for served, beginning in ((qwen3, "<think>"), (distilled, "")):
        triton.tokens = [beginning, thought, "\n\n", good]
        message = served.chat(**fields).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "A {sum}\nof 2."
        calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
        assert (message["content"], calls) == ((None, ["add"]) if "tools" in fields else (good, []))
        for gap in ("", "\n\n"):
            assert _conforms(triton.last, f"{beginning}{thought}{gap}{good}")
        assert not _conforms(triton.last, f"{beginning}{thought}\n{bad}")
        # A model that Qwen3's template leaves the choice may answer at once.
        assert _conforms(triton.last, good) == (served is qwen3)
        assert not _conforms(triton.last, f"\n{good}")


def _check_plain_guide(served: Endpoint, triton: FakeTriton, **kwargs: bool) -> None:
    triton.tokens = ['{"a":', " 1}"]
    json_object = {"type": "json_object"}
    response = served.chat(response_format=json_object, chat_template_kwargs=kwargs)
    assert response.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    assert triton.last.value("guided_decoding_guide_type") == "json"


def test_without_thinking_a_guide_holds_from_the_first_token(qwen3: Endpoint, triton: FakeTriton) -> None:
    _check_plain_guide(qwen3, triton, enable_thinking=False)
    assert triton.prompt.endswith("<think>\n\n</think>\n\n")


def test_some_templates_leave_no_room_before_a_guide(serve: Serve, triton: FakeTriton, tmp_path: Path) -> None:
    _check_plain_guide(serve("granite-3.3"), triton, thinking=True)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}")
    with endpoint(triton.port, chat_template=tmp_path / "t.jinja") as served:
        _check_plain_guide(served, triton)


@pytest.mark.parametrize(
    ("content", "kind"), [("<think>A</think>{", "regex"), ("{", "regex"), ("<think>A", "structural_tag")]
)
def test_a_guide_holds_for_the_rest_of_a_continued_answer(
    qwen3: Endpoint, triton: FakeTriton, content: str, kind: str
) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": content}]
    assert qwen3.chat(messages=messages, continue_final_message=True, guided_regex="a}").status_code == 200
    assert triton.last.value("guided_decoding_guide_type") == kind
    assert _conforms(triton.last, "a}" if kind == "regex" else "b</think>\na}")


def test_a_forced_call_cut_within_its_reasoning_is_none(qwen3: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["<think>", "\nA", " sum", ".", "</think>", "[]"]
    response = qwen3.chat(max_tokens=3, tools=[ADD], tool_choice="required", logprobs=True)
    (choice,) = response.json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == ("A sum", "", "length")
    assert "tool_calls" not in message
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == triton.tokens[:3]


@pytest.mark.parametrize("fields", [{"guided_json": "{"}, {"guided_regex": ""}])
def test_a_malformed_guide_is_the_models_to_refuse(qwen3: Endpoint, triton: FakeTriton, fields: Json) -> None:
    qwen3.chat(**fields)
    assert triton.last.value("guided_decoding_guide") in fields.values()


def test_earlier_reasoning_reaches_the_template(qwen3: Endpoint, triton: FakeTriton) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "", "reasoning": "A sum.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "4"}
    assert qwen3.chat(messages=[*QUESTION, answer, result]).status_code == 200
    assert "<think>\nA sum.\n</think>\n\n<tool_call>" in triton.prompt


def test_continued_reasoning_goes_on(triton: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think></think>")
    triton.tokens = [" sum.</think>", "4"]
    messages = [*QUESTION, {"role": "assistant", "content": "<think>A"}]
    with endpoint(triton.port, chat_template=tmp_path / "t.jinja") as served:
        message = served.chat(messages=messages, continue_final_message=True).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" sum.", "4")
