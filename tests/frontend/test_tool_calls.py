"""Tool calls found in text, in any chunks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_llama_openai.output.tool_calls import CallReader, ForcedCalls, Form, HermesReader, LlamaReader, ToolCall

NAMES = ("add", "get_weather")
READERS: dict[Form, type[HermesReader | LlamaReader]] = {"hermes": HermesReader, "llama3_json": LlamaReader}
Read = tuple[str, list[tuple[str, str]]]


def _parts(reader: CallReader, chunks: Iterable[str]) -> list[str | ToolCall]:
    return [*(part for chunk in chunks for part in reader.read(chunk)), *reader.end()]


def _read(reader: CallReader, chunks: Iterable[str]) -> Read:
    """Return the content, and each call's name and arguments."""
    parts = _parts(reader, chunks)
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls)))
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [(call.name, call.arguments) for call in calls]


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
    ("llama3_json", '{"name": {"add": 1}, "parameters": {}}', ('{"name": {"add": 1}, "parameters": {}}', [])),
    ("llama3_json", "{not json}", ("{not json}", [])),
    ("llama3_json", '{"name": "add", "parameters": {"a": "cut', ('{"name": "add", "parameters": {"a": "cut', [])),
    ("llama3_json", '{"name": "add", "parameters": {"t": "a\\\\\\"} b"}}', ("", [("add", '{"t": "a\\\\\\"} b"}')])),
    ("llama3_json", '{"name": "add", "price": 3}', ('{"name": "add", "price": 3}', [])),
    ("llama3_json", '{"name": "add"}; {"name": "add", "para', ('{"name": "add", "para', [("add", "{}")])),
    ("llama3_json", '{"name": "add"} and more', ("and more", [("add", "{}")])),
    ("llama3_json", " Just text.", (" Just text.", [])),
    ("llama3_json", "", ("", [])),
    ("hermes", "  Just text.", ("  Just text.", [])),
    ("hermes", '\n<tool_call>{"name": "add", "arguments": {}}', ("", [("add", "{}")])),
    ("hermes", '<tool_call>{"name": "add"}</tool_c', ("", [("add", "{}")])),
    ("hermes", '<tool_call>{"name": "add"} Done.', ("Done.", [("add", "{}")])),
    ("hermes", '<tool_call>{"name": "add"} x</tool_call>', ('<tool_call>{"name": "add"} x</tool_call>', [])),
    ("hermes", "<tool_call>[1]</tool_call> is", ("<tool_call>[1]</tool_call> is", [])),
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
    ("hermes", "a < b and <tool", ("a < b and <tool", [])),
    ("hermes", '<tool_call>{"name": "add", "argum', ('<tool_call>{"name": "add", "argum', [])),
]

PING, PONG = '{"name": "ping", "parameters": {}}', '{"name": "pong", "parameters": {}}'


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_calls_are_found_in_a_text(form: Form, text: str, expected: Read) -> None:
    assert _read(READERS[form](NAMES), [text]) == expected
    assert _read(READERS[form](NAMES), text) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_any_chunks_are_read_as_the_whole_text(data: st.DataObject) -> None:
    form, text, expected = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    chunks = [text[start:end] for start, end in itertools.pairwise(cuts)]
    assert _read(READERS[form](NAMES), chunks) == expected


_text = st.text(max_size=6)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    arguments=st.lists(st.dictionaries(_text, _json, max_size=3), min_size=1, max_size=3),
    ascii_only=st.booleans(),
    form=st.sampled_from(["hermes", "llama3_json"]),
    size=st.integers(1, 7),
)
def test_any_arguments_keep_their_values(
    arguments: list[dict[str, object]], ascii_only: bool, form: Form, size: int
) -> None:
    objects = [json.dumps(values, ensure_ascii=ascii_only) for values in arguments]
    if form == "hermes":
        text = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {values}}}\n</tool_call>' for values in objects)
    else:
        text = "; ".join(f'{{"name": "add", "parameters": {values}}}' for values in objects)
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    content, calls = _read(READERS[form](NAMES), chunks)
    assert content == ""
    assert [json.loads(values) for _, values in calls] == arguments


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet='<tool_call>/{}[]",:; \n\\name1', max_size=60),
    form=st.sampled_from(["hermes", "llama3_json"]),
)
def test_a_text_without_calls_is_content_unchanged(text: str, form: Form) -> None:
    content, calls = _read(READERS[form](NAMES), text)
    if not calls:
        assert content == text


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000 + "]" * 100_000, "1e999", "NaN", "9" * 5000], ids=["deep", "inf", "nan", "large"]
)
def test_arguments_that_json_cannot_hold_are_content(arguments: str) -> None:
    text = f'{{"name": "add", "parameters": {arguments}}}'
    assert _read(LlamaReader(NAMES), [text]) == (text, [])


def test_text_before_a_call_is_not_held_back() -> None:
    reader = HermesReader(NAMES)
    assert reader.read("I add. <tool") == ["I add. "]
    assert reader.read('_call>{"name": "add", "arguments"') == []


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_a_single_call_leaves_out_those_after_it(form: Form) -> None:
    call = '{"name": "add", "arguments": {}}'
    text = f"<tool_call>{call}</tool_call><tool_call>{call}</tool_call>" if form == "hermes" else f"{call}; {call}"
    assert _read(READERS[form](NAMES, single=True), text) == ("", [("add", "{}")])


def test_every_call_has_its_id() -> None:
    text = '{"name": "add"}; {"name": "add"}'
    ids = [part.id for part in _parts(LlamaReader(NAMES), [text]) if isinstance(part, ToolCall)]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("call_") for call_id in ids)


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("add", "1", [("add", "1")]),
        (None, '[{"name": "add", "parameters": {"a": "}"}}]', [("add", '{"a": "}"}')]),
        (None, f"[{PING}, {PONG}, {PING}, {PONG}]", [("ping", "{}"), ("pong", "{}")]),
    ],
    ids=["no object", "a brace in a text", "a repetition"],
)
def test_forced_calls_are_the_complete_ones_up_to_a_repetition(
    name: str | None, text: str, calls: list[tuple[str, str]]
) -> None:
    assert _read(ForcedCalls(name), text) == ("", calls)
