"""Bounds of lists and JSON objects, for request parameters: validation and conversion to a Python type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llama_engine.bounds import BoundError, Integer, Real, decode, show

_TOKEN = Integer(low=0)
_TOKEN_OR_PADDING = Integer(low=-1)


@dataclass(frozen=True)
class Words:
    """Up to `limit` words of at most `max_bytes` each, and `max_total_bytes` in all.

    Empty words, which are padding in batches, are removed. keeps_empty: keep them, for words that are parallel to
    another list.
    """

    limit: int
    max_bytes: int = 1024
    max_total_bytes: int | None = None
    keeps_empty: bool = False

    @property
    def description(self) -> str:
        """The bound in words."""
        total = "" if self.max_total_bytes is None else f", of {self.max_total_bytes} bytes together"
        return f"at most {self.limit} words of at most {self.max_bytes} bytes{total}"

    def parse(self, value: object) -> tuple[bytes, ...]:
        """Return the words in UTF-8, or raise BoundError."""
        # A request parameter of Triton can't be a list: its single value is one word.
        items = [value] if isinstance(value, (str, bytes)) else _items(value, "words")
        words = tuple(word for item in items if (word := decode(item).encode()) or self.keeps_empty)
        _check_count(len(words), self.limit, "words")
        for word in words:
            _check_count(len(word), self.max_bytes, "bytes in a word")
        _check_count(sum(map(len, words)), self.max_total_bytes, "bytes in all words")
        return words


@dataclass(frozen=True)
class Numbers:
    """Up to `limit` finite numbers within `bound`."""

    limit: int
    bound: Real

    @property
    def description(self) -> str:
        """The bound in words."""
        return f"at most {self.limit} numbers, each {self.bound.description}"

    def parse(self, value: object) -> tuple[float, ...]:
        """Return the numbers, or raise BoundError."""
        items = _items(value, "numbers")
        _check_count(len(items), self.limit, "numbers")
        try:
            return tuple(self.bound.parse(item) for item in items)
        except BoundError as error:
            raise BoundError(f"a list with {error.value}", f"a list, each {error.bound}") from None


@dataclass(frozen=True)
class TokenIds:
    """Up to `limit` token ids. -1 is padding for lists of unequal length and is removed."""

    limit: int | None = None

    @property
    def description(self) -> str:
        """The bound in words."""
        return "token ids" if self.limit is None else f"at most {self.limit} token ids"

    def parse(self, value: object) -> tuple[int, ...]:
        """Return the ids, or raise BoundError. The vocabulary's size is not checked here."""
        items = _items(value, "token ids")
        try:
            ids = tuple(token for item in items if (token := _TOKEN_OR_PADDING.parse(item)) != -1)
        except BoundError as error:
            raise BoundError(f"a list with {error.value}", "a list of token ids") from None
        _check_count(len(ids), self.limit, "ids")
        return ids


@dataclass(frozen=True)
class TokenBias:
    """A JSON object that maps up to `limit` token ids to numbers within `bound`."""

    limit: int
    bound: Real

    @property
    def description(self) -> str:
        """The bound in words."""
        return f"a JSON object of at most {self.limit} token ids, each with {self.bound.description}"

    def parse(self, value: object) -> tuple[tuple[int, float], ...]:
        """Return pairs (token id, number), or raise BoundError. The vocabulary's size is not checked here."""
        entries = value if isinstance(value, Mapping) else read_object(value)
        _check_count(len(entries), self.limit, "entries")
        pairs: dict[int, float] = {}
        for key, number in entries.items():
            try:
                pairs[_TOKEN.parse(key)] = self.bound.parse(number)
            except BoundError as error:
                raise BoundError(f"an object with {error.value}", self.description) from None
        return tuple(pairs.items())


def read_object(value: object) -> Mapping[str, object]:
    """Parse a string that contains a JSON object. Raises BoundError for anything else."""
    text = decode(value)
    try:
        read: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BoundError(f"not JSON ({error})", "a JSON object") from None
    if not isinstance(read, dict):
        raise BoundError(show(text), "a JSON object")
    return read


def _items(value: object, noun: str) -> list[object]:
    if not isinstance(value, (list, np.ndarray)):
        raise BoundError(show(value), f"a list of {noun}")
    return list(value)


def _check_count(count: int, limit: int | None, noun: str) -> None:
    if limit is not None and count > limit:
        raise BoundError(f"a value of {count} {noun}", f"at most {limit}")
