"""An answer in a form that two runs of one request can be compared in.

Left out is what a run determines and not the request: ids, the time, how many tokens of the prompt were cached and of
the answer guessed, and how a stream's text is cut into events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from perf.load.protocols import Protocol
from perf.load.records import Record

Answers = Mapping[Protocol, Sequence[Record]]

_CONTEXT = 60
"""Characters shown on either side of a difference."""
_INDEXED = ("choices", "tool_calls")
"""Lists of objects that an `index` names; the events of a stream continue each of them."""
_JOINED = ("text", "content", "reasoning_content", "reasoning", "arguments")
"""Strings whose deltas follow each other; others replace what came before."""


def compare(reference: Answers, answers: Answers) -> tuple[list[str], list[str]]:
    """Return the errors, and where answers differ from the reference's to the same requests.

    answers: to the same requests in the same order, more than once, too.
    """
    errors, different = [], []
    for protocol, records in answers.items():
        for number, record in enumerate(records):
            expected = reference[protocol][number % len(reference[protocol])]
            if record.error:
                errors.append(f"{protocol} {number}: {record.error}")
            elif not expected.error and (difference := _difference(content(expected), content(record))):
                different.append(f"{protocol} {number}: {difference}")
    return errors, different


def content(record: Record) -> str:
    """Return an answer's canonical JSON, of a stream all its events' in one."""
    whole: dict[str, Any] = {}
    for fields in record.answer:
        _add(whole, fields)
    for name in ("id", "created"):
        whole.pop(name, None)
    whole["usage"].pop("prompt_tokens_details", None)
    for name in ("accepted", "rejected"):
        whole["usage"].get("completion_tokens_details", {}).pop(f"{name}_prediction_tokens", None)
    for choice in whole["choices"]:
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or ():
            call.pop("id", None)
    return json.dumps(whole, sort_keys=True)


def _difference(expected: str, answer: str) -> str:
    """Return where an answer first differs, with what is there and what should be; "" if they are equal."""
    if answer == expected:
        return ""
    pairs = enumerate(zip(answer, expected, strict=False))
    same = next((index for index, (one, other) in pairs if one != other), min(len(answer), len(expected)))
    around = slice(max(same - _CONTEXT, 0), same + _CONTEXT)
    return f"at {same}: {answer[around]} instead of {expected[around]}"


def _add(whole: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if name in _INDEXED and value is not None:
            items = whole.get(name) or []
            whole[name] = items
            for item in value:
                _add(_indexed(items, item.get("index", len(items))), item)
        elif isinstance(value, list):
            whole[name] = (whole.get(name) or []) + value
        elif isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            _add(whole[name], value)
        elif name in _JOINED and value is not None:
            whole[name] = (whole.get(name) or "") + value
        elif value is not None or name not in whole:
            whole[name] = value


def _indexed(items: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Return the item of that index, added in its place if missing."""
    for item in items:
        if item["index"] == index:
            return item
    items.append({"index": index})
    items.sort(key=lambda item: int(item["index"]))
    return next(item for item in items if item["index"] == index)
