"""The log probabilities of an answer, as the three paths write them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from triton_llama.completion import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON doesn't have; vLLM's value."""


class _Token(NamedTuple):
    """A token at its place, or an alternative. text: of a special token its name; part: its bytes where they differ."""

    id: str
    text: str
    part: bytes | None
    logprob: float

    @property
    def octets(self) -> bytes:
        """The bytes that the token adds to the text."""
        return self.text.encode() if self.part is None else self.part

    @property
    def id_name(self) -> str:
        """The token's name in an answer with `return_tokens_as_token_ids`."""
        return f"token_id:{self.id}"


def _token(token_id: str, entry: Mapping[str, object]) -> _Token:
    """Return a token of the model's; MIN_LOGPROB stands for a missing or lower logprob."""
    logprob, part = entry.get("logprob"), entry.get("bytes")
    finite = max(float(logprob), MIN_LOGPROB) if isinstance(logprob, int | float) else MIN_LOGPROB
    octets = bytes(part) if isinstance(part, list) else None
    return _Token(token_id, str(entry.get("decoded_token") or ""), octets, finite)


def _tokens(position: TokenLogprobs) -> list[_Token]:
    """Return the token of a position, then its alternatives, likeliest first."""
    return [_token(token_id, entry) for token_id, entry in position.items()]


def _own_token(position: TokenLogprobs) -> _Token:
    return _token(*next(iter(position.items())))


def _token_of(token_id: str, octets: bytes, logprob: float) -> _Token:
    text = octets.decode(errors="replace")
    return _Token(token_id, text, None if text.encode() == octets else octets, logprob)


def logprobs_content(positions: Iterable[TokenLogprobs], top: int, *, as_ids: bool = False) -> list[dict[str, object]]:
    """Return tokens as a chat and a response have them. top: alternatives of each. as_ids: tokens are named by id."""
    content: list[dict[str, object]] = []
    for position in positions:
        if tokens := _tokens(position):
            # The token itself is among the alternatives if it is one of the likeliest.
            likeliest = sorted(tokens, key=lambda token: -token.logprob)[:top]
            alternatives = [_content(token, as_ids) for token in likeliest]
            content.append({**_content(tokens[0], as_ids), "top_logprobs": alternatives})
    return content


def _content(token: _Token, as_ids: bool) -> dict[str, object]:
    name = token.id_name if as_ids else token.text
    return {"token": name, "logprob": token.logprob, "bytes": list(token.octets)}


Lists = dict[str, list[object]]
"""The logprobs of a completion's choice: four lists, with an element for each token."""
_Row = tuple[str, float | None, dict[str, float] | None, int]
"""A token's name, its logprob, those of the likeliest tokens by name, its offset."""


def _lists(rows: Sequence[_Row]) -> Lists:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}


class CompletionLogprobs:
    """Makes the logprobs of a completion's choice; it counts the characters of the text before.

    as_ids: tokens are named by their ids.
    """

    def __init__(self, *, as_ids: bool = False) -> None:
        self._as_ids = as_ids
        self._offset = 0
        """Characters of the text that are complete."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_prompt(self, text: str, positions: Iterable[TokenLogprobs | None], first_id: int | None) -> Lists:
        """Return the lists of an echoed prompt, whose first token has no log probability.

        first_id: the id of the first token, for an answer that names tokens by id.
        """
        scored = [position for position in positions if position]
        # In a prompt, a special token is its name.
        own = [token._replace(part=token.part or None) for token in map(_own_token, scored)]
        prompt, rest = text.encode(), b"".join(token.octets for token in own)
        if rest == b" " + prompt:
            # SentencePiece puts a space between the BOS and the text.
            own[0], rest = _token_of(own[0].id, own[0].octets[1:], own[0].logprob), prompt
        # The first token is what the others leave of the text: nothing for a BOS that the server adds.
        first = _token_of(str(first_id), prompt.removesuffix(rest) if prompt.endswith(rest) else b"", 0.0)
        rows: list[_Row] = [(self._name(first), None, None, self._advance(first.octets))]
        rows += map(self._row, own, scored)
        self._offset = len(text)
        self._decoder.reset()
        return _lists(rows)

    def add(self, positions: Iterable[TokenLogprobs]) -> Lists:
        """Return the lists of these tokens."""
        return _lists([self._row(_own_token(position), position) for position in positions])

    def _row(self, own: _Token, position: TokenLogprobs) -> _Row:
        top = self._by_name([own, *_tokens(position)[1:]])
        return self._name(own), own.logprob, top, self._advance(own.octets)

    def _advance(self, octets: bytes) -> int:
        """Return the offset of the character in which a token begins, and add the token to the text before."""
        begun, _ = self._decoder.getstate()
        # A character that these bytes cut off is U+FFFD in the text.
        offset = self._offset + (1 if begun and octets and octets[0] & 0xC0 != 0x80 else 0)
        self._offset += len(self._decoder.decode(octets))
        return offset

    def _by_name(self, tokens: Sequence[_Token]) -> dict[str, float]:
        """Return names with their logprobs, likeliest first; a name that is taken gives way to the token's id."""
        named: dict[str, float] = {}
        for token in tokens:
            name = self._name(token)
            named[token.id_name if name in named else name] = token.logprob
        return dict(sorted(named.items(), key=lambda item: -item[1]))

    def _name(self, token: _Token) -> str:
        """Return a token's text; of a part of a character its bytes, as OpenAI wrote them."""
        if self._as_ids:
            return token.id_name
        return "bytes:" + "".join(f"\\x{octet:02x}" for octet in token.part) if token.part else token.text
