"""Translates a guide, the constraint on a completion's text, into a grammar in llguidance's dialect of Lark.

There are five kinds, with TensorRT-LLM's names: a JSON object, a JSON schema, a regular expression, a grammar (GBNF or
Lark), and a structural tag (free text in which triggers begin tagged sections). This module imports llguidance and the
standard library only, to keep the guide-checking process small.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

# Without forcing, the mask depends on the text's bytes only; with it, on one tokenization of the next forced bytes.
_HEAD = '%llguidance {"no_forcing": true}\n'

_ANY_TEXT = r"/(.|\n)*/"

# A gap between two JSON tokens, which may also be empty: small models fill what a gap may hold.
_WHITESPACE = " "


class GuideError(ValueError):
    """The guide is malformed or unsupported. The message completes the sentence "guided_decoding_guide …"."""


def to_lark(kind: str, text: str, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar of a guide. Raises GuideError.

    kind: guided_decoding_guide_type. text: the guide; ignored for the kind `json`. special_tokens: token ids by name,
    such as <|python_tag|>; tags may contain these names.
    """
    try:
        grammar = _HEAD + _to_lark(kind, text, special_tokens)
        # JSON can contain escaped lone surrogates, which llguidance can't take.
        grammar.encode()
    except RecursionError:
        raise GuideError("is nested too deeply") from None
    except UnicodeEncodeError:
        raise GuideError("has a lone surrogate, which no text has") from None
    return grammar


def _to_lark(kind: str, text: str, special_tokens: Mapping[str, int]) -> str:
    if kind == "json":
        return f"start: {_json({'type': 'object'})}\n"
    if kind == "json_schema":
        return f"start: {_json(_parse_json(text))}\n"
    if kind == "regex":
        return f"start: {_regex(text)}\n"
    if kind == "ebnf_grammar":
        return _grammar(text)
    if kind == "structural_tag":
        return _StructuralTag(special_tokens).grammar(_parse_json(text))
    raise AssertionError(f"no guide's kind: {kind}")


def _parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(text)
    except ValueError as error:
        raise GuideError(f"is not JSON: {error}") from error


def _json(schema: Any) -> str:  # noqa: ANN401 - any JSON value; llguidance refuses what is no schema
    if schema is True:
        schema = {}
    guidance = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    # A pattern would override the schema's own whitespace_flexible.
    if isinstance(guidance, dict) and not guidance.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, **guidance}}
    return f"%json {json.dumps(schema)}"


def _regex(pattern: str) -> str:
    """Return a Lark terminal that matches the whole text, with \\d and \\w as in JavaScript."""
    # Drop the anchors ^ and $: llguidance has none, and the terminal always matches the whole text.
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not _ends_in_escape(pattern[:-1]):
        pattern = pattern[:-1]
    if _ends_in_escape(pattern):
        # The converter would drop the backslash.
        raise GuideError("has a regular expression that ends in a backslash, which escapes nothing")
    return f"/{regex_to_lark(pattern, 'dw')}/" if pattern else '""'


def _grammar(text: str) -> str:
    """Return the Lark of a grammar in GBNF or Lark."""
    try:
        return any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter raises plain Exception
        raise GuideError(f"is neither GBNF nor Lark: {error}") from error


def _nested_grammar(text: str) -> str:
    """Return the Lark expression of a grammar, whose rules' names are its own."""
    grammar = _grammar(text)
    # An expression that closes the braces would be another grammar.
    if problem := LLMatcher.validate_grammar(grammar):
        raise GuideError(f"has a malformed grammar: {problem.splitlines()[0]}")
    return f"%lark {{\n{grammar}\n}}"


def _ends_in_escape(pattern: str) -> bool:
    """Return whether a pattern ends in an unescaped backslash."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


class _StructuralTag:
    """Translates one structural tag: XGrammar's formats, and its older form with structures and triggers."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        # Longer names first: one may contain another.
        self._special_tokens = sorted(special_tokens.items(), key=lambda item: -len(item[0]))
        self._rules: list[str] = []
        self._numbers = itertools.count()

    def grammar(self, tag: Any) -> str:  # noqa: ANN401 - any JSON value
        if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
            raise GuideError('is no structural tag: a JSON object with "type": "structural_tag"')
        if "structures" in tag:
            tags = [
                {**item, "content": {"type": "json_schema", "json_schema": item["schema"]}}
                for item in _list(tag, "structures", ("begin", "schema", "end"))
            ]
            tag = {"format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}}
        start = self._format(tag.get("format"), "")
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _format(self, node: Any, end: str) -> str:  # noqa: ANN401 - any JSON value
        """Return the Lark expression of a format followed by the text `end`."""
        kind = node.get("type") if isinstance(node, dict) else None
        if kind == "any_text":
            return self._any_text(end)
        expression = {
            "const_string": lambda: self._literal(_text(node, "value")),
            "json_schema": lambda: _json(node.get("json_schema", False)),
            "regex": lambda: _regex(_text(node, "pattern")),
            "grammar": lambda: _nested_grammar(_text(node, "grammar")),
            "sequence": lambda: " ".join(self._elements(node)),
            "or": lambda: f"({' | '.join(self._elements(node))})",
            "tag": lambda: self._tag(node, _text(node, "begin")),
            "triggered_tags": lambda: self._triggered_tags(node),
            "tags_with_separator": lambda: self._separated_tags(node),
        }.get(str(kind))
        if expression is None:
            raise GuideError(f"has a format of the type {kind!r}, which is not supported")
        return f"{expression()} {self._literal(end)}"

    def _elements(self, node: dict[str, Any]) -> Iterator[str]:
        for element in _list(node, "elements"):
            yield self._rule(self._format(element, ""))

    def _tag(self, node: dict[str, Any], begin: str) -> str:
        """Return the expression of a tag: `begin`, its content, its end.

        begin: what of the tag's opening text isn't written yet; in free text its trigger is.
        """
        content, end = node.get("content"), _text(node, "end")
        if end and isinstance(content, dict) and content.get("type") == "any_text":
            return self._any_text(end, begin)
        return f"{self._literal(begin)} {self._format(content, end)}"

    def _triggered_tags(self, node: dict[str, Any]) -> str:
        """Return the expression of free text in which each trigger begins one of the tags."""
        tags, triggers = [], _list(node, "triggers")
        if not all(isinstance(text, str) for text in triggers):
            raise GuideError(f"has triggers {triggers!r}; they must be strings")
        for tag in _list(node, "tags", ("begin", "content", "end")):
            begin = _text(tag, "begin")
            trigger = next((text for text in triggers if begin.startswith(text)), "")
            if not trigger:
                raise GuideError(f"has the tag {begin!r}, which begins with none of the triggers")
            tags.append(self._rule(f"{self._any_text(trigger)} {self._tag(tag, begin.removeprefix(trigger))}"))
        choice, required = f"({' | '.join(tags)})", bool(node.get("at_least_one"))
        if node.get("stop_after_first"):
            return choice if required else f"({choice} | {_ANY_TEXT})"
        return f"{choice}{'+' if required else '*'} {_ANY_TEXT}"

    def _separated_tags(self, node: dict[str, Any]) -> str:
        tags = _list(node, "tags", ("begin", "content", "end"))
        choice = self._rule(" | ".join(self._rule(self._tag(tag, _text(tag, "begin"))) for tag in tags))
        more = "" if node.get("stop_after_first") else f" ({self._literal(_text(node, 'separator'))} {choice})*"
        return f"({choice}{more})" + ("" if node.get("at_least_one") else "?")

    def _any_text(self, end: str, begin: str = "") -> str:
        """Return the expression of `begin` and any text up to and including the first `end`.

        Of any text, without `begin`, if `end` is empty.
        """
        if not end:
            return _ANY_TEXT
        # A special token is not text, so free text ends before it.
        if any(end.startswith(name) for name, _ in self._special_tokens):
            return f"{self._literal(begin)} {_ANY_TEXT} {self._literal(end)}"
        if any(name in begin for name, _ in self._special_tokens):
            return f"{self._literal(begin)} {self._any_text(end)}"
        # Both are one lexeme: `begin` alone would lose to a longer lexeme that may stand here.
        return self._rule(f"{self._literal(begin)} {_ANY_TEXT}", f"[suffix={_quoted(end)}]")

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{next(self._numbers)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """Return the expression of a literal text, with special tokens by id: their names as text aren't generated."""
        for name, token in self._special_tokens:
            before, separator, after = text.partition(name)
            if separator:
                return f"{self._literal(before)} <[{token}]> {self._literal(after)}".strip()
        return _quoted(text) if text else ""


def _quoted(text: str) -> str:
    # Lark's strings are JSON strings, except that U+007F must be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(node: dict[str, Any], name: str) -> str:
    value = node.get(name)
    if not isinstance(value, str):
        raise GuideError(f"has a {node.get('type', 'tag')} whose {name} is {value!r}; it must be a string")
    return value


def _list(node: dict[str, Any], name: str, keys: tuple[str, ...] = ()) -> list[Any]:
    """Return a node's list, or raise GuideError if it is empty or an element lacks one of the `keys`."""
    values = node.get(name)
    if not isinstance(values, list) or not values:
        raise GuideError(f"has {name} {values!r}; they must be a list of at least one")
    for value in values:
        missing = [key for key in keys if not isinstance(value, dict) or key not in value]
        if missing:
            raise GuideError(f"has an element of {name} without {missing[0]}")
    return values
