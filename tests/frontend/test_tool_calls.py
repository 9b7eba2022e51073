"""Tool calls found in text, in any chunks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_llama_openai.output.tool_calls import READERS, CallReader, ForcedCalls, HermesReader, Llama3Reader, ToolCall
from triton_llama_openai.settings import ToolForm

NAMES = ("add", "get_weather")
Read = tuple[str, list[tuple[str, str]]]


def _read(reader: CallReader, chunks: Iterable[str]) -> Read:
    """Return the content, and each call's name and arguments."""
    parts = [*(part for chunk in chunks for part in reader.read(chunk)), *reader.end()]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [(call.name, call.arguments) for call in calls]


ADD, ONE = '{"name": "add", "arguments": {"a": 1}}', ("add", '{"a": 1}')
NESTED = '{"a": [1, {"b": "]}"}]}'
LLAMA: list[tuple[str, Read]] = [
    ("Just text.", ("Just text.", [])),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", [ONE])),
    ('{"name": "add", "parameters": {"a": 1}}; {"name": "get_weather"}', ("", [ONE, ("get_weather", "{}")])),
    (f'[{{"name": "add", "parameters": {NESTED}}}, {ADD}]', ("", [("add", NESTED), ONE])),
    ('{"parameters": {"a": 1}, "name": "add"}', ("", [ONE])),
    ('{"type": "function", "name": "add", "parameters": {}}', ("", [("add", "{}")])),
    ('{"name": "add", "arguments": "{\\"a\\": 1}"}', ("", [ONE])),
    ('{"name": "unknown", "parameters": {}}', ('{"name": "unknown", "parameters": {}}', [])),
    ("{not json}", ("{not json}", [])),
    ('{"name": "add", "parameters": {"a": "cut', ('{"name": "add", "parameters": {"a": "cut', [])),
    ('{"name": "add", "parameters": {"t": "a\\\\\\"} b"}}', ("", [("add", '{"t": "a\\\\\\"} b"}')])),
    ('{"name": "add", "price": 3}', ('{"name": "add", "price": 3}', [])),
    ('{"name": "add"}; {"name": "add", "para', ('{"name": "add", "para', [("add", "{}")])),
    ('{"name": "add"} and more', ("and more", [("add", "{}")])),
    ("", ("", [])),
]
HERMES: list[tuple[str, Read]] = [
    ('<tool_call>{"name": "add"}</tool_c', ("", [("add", "{}")])),
    ('<tool_call>{"name": "add"} Done.', ("Done.", [("add", "{}")])),
    ('<tool_call>{"name": "add"} x</tool_call>', ('<tool_call>{"name": "add"} x</tool_call>', [])),
    ("<tool_call>[1]</tool_call> is", ("<tool_call>[1]</tool_call> is", [])),
    (f"I add. <tool_call>{ADD}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>", ("I add. ", [ONE, ONE])),
    ("a < b and <tool", ("a < b and <tool", [])),
]
CASES: list[tuple[ToolForm, str, Read]] = [*(("llama3_json", *case) for case in LLAMA)]
CASES += [("hermes", *case) for case in HERMES]
PING, PONG = '{"name": "ping", "parameters": {}}', '{"name": "pong", "parameters": {}}'


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_calls_are_found_in_a_text(form: ToolForm, text: str, expected: Read) -> None:
    assert _read(READERS[form](NAMES), [text]) == expected
    assert _read(READERS[form](NAMES), text) == expected


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet='<tool_call>/{}[]",:; \n\\name1', max_size=60),
    form=st.sampled_from(["hermes", "llama3_json"]),
)
def test_a_text_without_calls_is_content_unchanged(text: str, form: ToolForm) -> None:
    content, calls = _read(READERS[form](NAMES), text)
    if not calls:
        assert content == text


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000 + "]" * 100_000, "1e999", "9" * 5000], ids=["deep", "inf", "large"]
)
def test_arguments_that_json_cannot_hold_are_content(arguments: str) -> None:
    text = f'{{"name": "add", "parameters": {arguments}}}'
    assert _read(Llama3Reader(NAMES), [text]) == (text, [])


def test_text_before_a_call_is_not_held_back() -> None:
    reader = HermesReader(NAMES)
    assert reader.read("I add. <tool") == ["I add. "]
    assert reader.read('_call>{"name": "add", "arguments"') == []


def test_a_single_call_leaves_out_those_after_it() -> None:
    texts = {"hermes": f"<tool_call>{ADD}</tool_call>" * 2, "llama3_json": f"{ADD}; {ADD}"}
    for form, reader in READERS.items():
        assert _read(reader(NAMES, single=True), texts[form]) == ("", [ONE])


def test_forced_calls_end_with_a_repetition() -> None:
    assert _read(ForcedCalls("add"), "1") == ("", [("add", "1")])
    assert _read(ForcedCalls(None), f'[{{"name": "add", "parameters": {NESTED}}}]') == ("", [("add", NESTED)])
    assert _read(ForcedCalls(None), f"[{PING}, {PONG}, {PING}, {PONG}]") == ("", [("ping", "{}"), ("pong", "{}")])
