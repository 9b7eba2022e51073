"""Bounds of lists and JSON objects: what a request parameter may be, and its Python form."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama_engine.bounds import BoundError, Real, decode, show

MAX_JSON_CHARACTERS = 1 << 20
"""Of a value in JSON: beyond every use, and parsed in some milliseconds."""


@dataclass(frozen=True)
class Words:
    """Up to `limit` words of at most `max_bytes` each, and `max_total_bytes` in all.

    Empty words, which clients pad rows with, are left out, unless the words correspond to another list.
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
        # bytes: a word of a request parameter, which can't be a list.
        items = [value] if isinstance(value, (str, bytes)) else _items(value, "a list of words")
        words = [word for item in items if (word := decode(item).encode()) or self.keeps_empty]
        if len(words) > self.limit:
            raise BoundError(f"a list of {len(words)} words", f"at most {self.limit} words")
        for word in words:
            if len(word) > self.max_bytes:
                raise BoundError(
                    f"a list with a word of {len(word)} bytes",
                    f"of words of at most {self.max_bytes} bytes",
                )
        size = sum(map(len, words))
        if self.max_total_bytes is not None and size > self.max_total_bytes:
            raise BoundError(f"a list of words of {size} bytes together", f"at most {self.max_total_bytes} bytes")
        return tuple(words)


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
        items = _items(value, "a list of numbers")
        if len(items) > self.limit:
            raise BoundError(f"a list of {len(items)} numbers", f"at most {self.limit} numbers")
        numbers = []
        for item in items:
            try:
                numbers.append(self.bound.parse(item))
            except BoundError as error:
                raise BoundError(f"a list with {error.value}", f"a list, each {error.bound}") from None
        return tuple(numbers)


@dataclass(frozen=True)
class TokenIds:
    """Up to `limit` ids of tokens. -1 is ignored: rows of unequal length are padded with it."""

    limit: int | None = None

    @property
    def description(self) -> str:
        """The bound in words."""
        return "token ids" if self.limit is None else f"at most {self.limit} token ids"

    def parse(self, value: object) -> tuple[int, ...]:
        """Return the ids, which may lie beyond the vocabulary, or raise BoundError."""
        if isinstance(value, np.ndarray):
            # Counted before they are Python's: a tensor may have millions.
            self._check_count(count_ids(value))
            items = value.tolist()
        else:
            items = _items(value, "a list of token ids")
        for item in items:
            if type(item) is not int or item < -1:
                raise BoundError(f"a list with {show(item)}", "a list of token ids")
        ids = tuple(token for token in items if isinstance(token, int) and token != -1)
        self._check_count(len(ids))
        return ids

    def _check_count(self, count: int) -> None:
        if self.limit is not None and count > self.limit:
            raise BoundError(f"a list of {count} ids", f"at most {self.limit} ids")


def count_ids(ids: NDArray[np.int32]) -> int:
    """Return how many of the ids are no padding."""
    return int(np.count_nonzero(ids != -1))


@dataclass(frozen=True)
class TokenBias:
    """A JSON object of up to `limit` token ids, each with a number within `bound`."""

    limit: int
    bound: Real

    @property
    def description(self) -> str:
        """The bound in words."""
        return f"a JSON object of at most {self.limit} token ids, each with {self.bound.description}"

    def parse(self, value: object) -> tuple[tuple[int, float], ...]:
        """Return the pairs, whose ids may lie beyond the vocabulary, or raise BoundError."""
        entries = value if isinstance(value, Mapping) else read_object(value)
        if len(entries) > self.limit:
            raise BoundError(f"an object of {len(entries)} entries", f"at most {self.limit} entries")
        pairs: dict[int, float] = {}
        for key, number in entries.items():
            # No sign and no leading zero: two keys can't be one token.
            if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key, re.ASCII):
                raise BoundError(f"an object with the key {show(key)}", "of token ids")
            try:
                pairs[int(key)] = self.bound.parse(number)
            except BoundError as error:
                raise BoundError(f"an object with {error.value} for {key}", f"of numbers, each {error.bound}") from None
        return tuple(pairs.items())


def read_object(value: object) -> Mapping[str, object]:
    """Return the JSON object in a string. Raises BoundError for other JSON, and for a key that is there twice."""
    text = decode(value)
    if len(text) > MAX_JSON_CHARACTERS:
        raise BoundError(f"a text of {len(text)} characters", f"JSON of at most {MAX_JSON_CHARACTERS} characters")
    try:
        read: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise BoundError("JSON of too many levels", "a JSON object") from None
    except BoundError:
        raise
    except json.JSONDecodeError as error:
        raise BoundError(f"not JSON ({error.msg} at character {error.pos})", "a JSON object") from None
    except ValueError as error:
        raise BoundError(f"not JSON ({error})", "a JSON object") from None
    if not isinstance(read, dict):
        raise BoundError(show(text), "a JSON object")
    return read


def _items(value: object, bound: str) -> list[object]:
    if isinstance(value, np.ndarray):
        return list(value)
    if not isinstance(value, list):
        raise BoundError(show(value), bound)
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    read = dict(pairs)
    if len(read) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise BoundError(f"an object with {show(twice)} twice", "of different keys")
    return read


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
