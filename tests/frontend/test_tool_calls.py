"""Tool calls found in text, in any cut of it into pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_llama_openai.tool_calls import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Form,
    NamedCall,
    Part,
    TextReader,
    ToolCallReader,
)

NAMES = ("add", "get_weather")
Read = tuple[str, list[tuple[str, str]]]


def _read(reader: TextReader, pieces: Iterable[str]) -> Read:
    """Return the content, and each call's name and arguments."""
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.read(piece)
    parts += reader.end()
    content = "".join(part.text for part in parts if isinstance(part, ContentDelta))
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        elif isinstance(part, ArgumentsDelta):
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.text)
    return content, calls


CASES: list[tuple[Form, str, Read]] = [
    ("llama3_json", "Just text.", ("Just text.", [])),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    (
        "llama3_json",
        '{"name": "add", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {"city": "Bonn"}}',
        ("", [("add", '{"a": 1}'), ("get_weather", '{"city": "Bonn"}')]),
    ),
    (
        "llama3_json",
        '[{"name": "add", "parameters": {"a": [1, {"b": "]}"}]}}, {"name": "add", "parameters": {}}]',
        ("", [("add", '{"a": [1, {"b": "]}"}]}'), ("add", "{}")]),
    ),
    ("llama3_json", '{"parameters": {"a": 1}, "name": "add"}', ("", [("add", '{"a": 1}')])),
    ("llama3_json", '{"name": "add"}', ("", [("add", "{}")])),
    ("llama3_json", '{"type": "function", "name": "add", "parameters": {}}', ("", [("add", "{}")])),
    ("llama3_json", '{"name": "add", "arguments": "{\\"a\\": 1}"}', ("", [("add", '{"a": 1}')])),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', ('{"name": "unknown", "parameters": {}}', [])),
    ("llama3_json", '{"answer": {"name": "add"}, "b": 1}', ('{"answer": {"name": "add"}, "b": 1}', [])),
    ("llama3_json", '{"name": "ad', ('{"name": "ad', [])),
    ("llama3_json", '{"name": ["add"]}', ('{"name": ["add"]}', [])),
    ("llama3_json", '{"name": {"add": 1}, "parameters": {}}', ('{"name": {"add": 1}, "parameters": {}}', [])),
    ("llama3_json", '{"name": null, "parameters": {}}', ('{"name": null, "parameters": {}}', [])),
    ("llama3_json", "{not json}", ("{not json}", [])),
    ("llama3_json", "[1] is a list", ("[1] is a list", [])),
    ("llama3_json", '{"name": "add", "parameters": {"a": "cut', ("", [("add", '{"a": "cut')])),
    ("llama3_json", '{"name": "add", "parameters": {"t": "a\\\\\\"} b"}}', ("", [("add", '{"t": "a\\\\\\"} b"}')])),
    ("hermes", "Just text.", ("Just text.", [])),
    (
        "hermes",
        'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        ("I add. ", [("add", '{"a": 1}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>',
        ("", [("add", '{"a": 1}'), ("get_weather", '{"city": "Köln"}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>\nDone.',
        ("Done.", [("add", "{}")]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "no", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "no", "arguments": {}}</tool_call>', []),
    ),
    ("hermes", '<tool_call>{"name": ["add"]}', ('<tool_call>{"name": ["add"]}', [])),
    ("hermes", "a < b and <tool", ("a < b and <tool", [])),
    ("hermes", '{"name": "add", "arguments": {}}', ('{"name": "add", "arguments": {}}', [])),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a"', ("", [("add", '{"a"')])),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_a_text_is_read_as_content_and_calls_whole_or_character_by_character(
    form: Form, text: str, expected: Read
) -> None:
    assert _read(ToolCallReader(form, NAMES), [text]) == _read(ToolCallReader(form, NAMES), text) == expected


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_text_is_read_the_same_in_any_pieces(data: st.DataObject) -> None:
    form, text, expected = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    assert _read(ToolCallReader(form, NAMES), pieces) == expected


_text = st.text(max_size=6)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(
    arguments=st.lists(st.dictionaries(_text, _json, max_size=3), min_size=1, max_size=3),
    ascii_only=st.booleans(),
    form=st.sampled_from(["hermes", "llama3_json"]),
    size=st.integers(1, 7),
)
def test_any_arguments_are_read_as_they_are_written(
    arguments: list[dict[str, object]], ascii_only: bool, form: Form, size: int
) -> None:
    written = [json.dumps(one, ensure_ascii=ascii_only) for one in arguments]
    if form == "hermes":
        text = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {one}}}\n</tool_call>' for one in written)
    else:
        text = "; ".join(f'{{"name": "add", "parameters": {one}}}' for one in written)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert _read(ToolCallReader(form, NAMES), pieces) == ("", [("add", one) for one in written])


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet='<tool_call>/{}[]",:; \n\\name1', max_size=60),
    form=st.sampled_from(["hermes", "llama3_json"]),
)
def test_any_text_is_read_without_an_error_and_without_losing_what_is_no_call(text: str, form: Form) -> None:
    content, calls = _read(ToolCallReader(form, NAMES), text)
    if not calls:
        assert content == text


def test_a_name_of_any_depth_is_content() -> None:
    text = '{"name": ' + "[" * 100_000 + "]" * 100_000 + ', "parameters": {}}'
    assert _read(ToolCallReader("llama3_json", NAMES), [text]) == (text, [])


def test_arguments_come_while_they_are_generated() -> None:
    reader = ToolCallReader("llama3_json", NAMES)
    assert reader.read('{"name": "add", ') == []
    started = reader.read('"parameters": {"a": ')
    assert [type(part) for part in started] == [CallStart, ArgumentsDelta]
    assert started[1] == ArgumentsDelta(0, '{"a": ')
    assert reader.read("12") == [ArgumentsDelta(0, "12")]
    assert reader.read("3}") == [ArgumentsDelta(0, "3}")]
    assert reader.read("}") == reader.end() == []


def test_ordinary_json_is_content_as_soon_as_its_first_key_is_no_calls() -> None:
    reader = ToolCallReader("llama3_json", NAMES)
    assert reader.read('{"answer": 4') == [ContentDelta('{"answer": 4')]
    assert reader.read("2}") == [ContentDelta("2}")]


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_calls_after_the_first_are_left_out_where_only_one_is_asked_for(form: Form) -> None:
    call = '{"name": "add", "arguments": {}}'
    text = f"<tool_call>{call}</tool_call><tool_call>{call}</tool_call>" if form == "hermes" else f"{call}; {call}"
    assert _read(ToolCallReader(form, NAMES, only_one=True), text) == ("", [("add", "{}")])


def test_every_call_has_an_id_of_its_own() -> None:
    text = '{"name": "add"}; {"name": "add"}'
    ids = [part.id for part in ToolCallReader("llama3_json", NAMES).read(text) if isinstance(part, CallStart)]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)


def test_a_named_calls_text_is_its_arguments() -> None:
    assert _read(NamedCall("add"), ['{"a"', ": 1}"]) == ("", [("add", '{"a": 1}')])
