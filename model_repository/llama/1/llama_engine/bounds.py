"""Bounds of single values, for settings and request parameters: validation and conversion to a Python type.

A value comes from a setting (a string), a tensor (NumPy scalars, bytes) or JSON. Numbers and flags may be strings:
settings always are, and clients of Triton's vLLM backend send them so. A violation raises BoundError with the value and
the bound.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import numpy as np

T_co = TypeVar("T_co", covariant=True)

MAX_SHOWN_CHARACTERS = 100
"""Maximum characters of a value in an error message."""

# int() and float() also accept "1_000", " 7 ", "nan" and the digits of other scripts.
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_DECIMAL = re.compile(r"[+-]?[0-9.]{1,40}([eE][+-]?[0-9]{1,3})?", re.ASCII)


class BoundError(ValueError):
    """A value violates its bound. value, bound: both as text for an error message."""

    def __init__(self, value: str, bound: str) -> None:
        self.value, self.bound = value, bound
        super().__init__(f"is {value}; it must be {bound}")


class Bound(Protocol[T_co]):
    """The values that a setting or a request parameter may have, and their Python type."""

    @property
    def description(self) -> str:
        """The allowed values in words, to complete "it must be ..."."""

    def parse(self, value: object) -> T_co:
        """Return the value converted to its Python type, or raise BoundError."""


@dataclass(frozen=True)
class _Range:
    """A number in [low, high] and greater than `above`; None is no limit."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    noun: ClassVar[str]

    @property
    def description(self) -> str:
        """The bound in words."""
        limits = (("at least", self.low), ("greater than", self.above), ("at most", self.high))
        # Print an int in full, and a float without a trailing ".0".
        texts = [
            f"{words} {limit if isinstance(limit, int) else f'{limit:g}'}"
            for words, limit in limits
            if limit is not None
        ]
        return f"{self.noun}, {' and '.join(texts)}" if texts else self.noun

    def _check(self, number: float, value: object) -> None:
        inside = (
            (self.low is None or number >= self.low)
            and (self.high is None or number <= self.high)
            and (self.above is None or number > self.above)
        )
        if not (inside and math.isfinite(number)):
            raise BoundError(show(value), self.description)


@dataclass(frozen=True)
class Integer(_Range):
    """A whole number in [low, high], or such a number as text; 3.0 is none."""

    noun = "a whole number"

    def parse(self, value: object) -> int:
        """Return the number, or raise BoundError."""
        number = int(value) if isinstance(value, str) and _INTEGER.fullmatch(value) else value
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise BoundError(show(value), self.description)
        self._check(int(number), value)
        return int(number)


@dataclass(frozen=True)
class Real(_Range):
    """A finite number in [low, high], greater than `above`, or such a number as text."""

    noun = "a finite number"

    def parse(self, value: object) -> float:
        """Return the number, or raise BoundError."""
        number = math.nan
        is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if is_number or (isinstance(value, str) and _DECIMAL.fullmatch(value)):
            # float() refuses integers that are too large, and "1.2.3".
            with suppress(OverflowError, ValueError):
                number = float(value)  # type: ignore[arg-type]  # a number or a decimal string
        self._check(number, value)
        return number


@dataclass(frozen=True)
class Flag:
    """A boolean, or its text ("true", "False")."""

    description = "true or false"

    def parse(self, value: object) -> bool:
        """Return the flag, or raise BoundError."""
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        if value in ("true", "True", "false", "False"):
            return value in ("true", "True")
        raise BoundError(show(value), self.description)


@dataclass(frozen=True)
class Text:
    """UTF-8 text of at most `max_bytes` bytes; not empty, unless `may_be_empty`."""

    max_bytes: int | None = None
    may_be_empty: bool = True

    @property
    def description(self) -> str:
        """The bound in words."""
        text = "UTF-8 text" if self.may_be_empty else "a text that is not empty"
        return text if self.max_bytes is None else f"{text} of at most {self.max_bytes} bytes"

    def parse(self, value: object) -> str:
        """Return the text, or raise BoundError."""
        text = decode(value)
        if not (text or self.may_be_empty):
            raise BoundError(show(value), self.description)
        if self.max_bytes is not None and len(text.encode()) > self.max_bytes:
            raise BoundError(f"a text of {len(text.encode())} bytes", f"at most {self.max_bytes} bytes")
        return text


@dataclass(frozen=True)
class Choice:
    """One of a fixed set of words. An empty word in the set stands for "none" and is not listed in messages."""

    words: tuple[str, ...]

    @property
    def description(self) -> str:
        """The bound in words."""
        return f"one of {', '.join(filter(None, self.words))}"

    def parse(self, value: object) -> str:
        """Return the word, or raise BoundError."""
        text = decode(value)
        if text not in self.words:
            raise BoundError(show(text), self.description)
        return text


@dataclass(frozen=True)
class Pattern:
    """A text that a regular expression matches as a whole."""

    description: str
    regex: str

    def parse(self, value: object) -> str:
        """Return the text, or raise BoundError."""
        text = decode(value)
        if not re.fullmatch(self.regex, text):
            raise BoundError(show(text), self.description)
        return text


_PORT = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-4])"
"""A TCP port whose next one is a port, too."""

ADDRESS = Pattern(
    "off, or an address such as tcp://127.0.0.1:5557, whose next port is free, too",
    rf"off|tcp://(?:\*|[A-Za-z0-9.-]+):{_PORT}(?:/[!-~]*)?",
)
"""A TCP address to bind, tcp://HOST:PORT or tcp://HOST:PORT/TOPIC; HOST is a name, an IPv4 address, or * for all."""

URL = Pattern("off, or a URL such as http://127.0.0.1:4318", r"off|https?://[A-Za-z0-9.:\[\]-]+(?:/[!-~]*)?")
"""The URL of an HTTP server, without a user or a password."""


def show(value: object) -> str:
    """Return a value as text for an error message: strings quoted, cut to MAX_SHOWN_CHARACTERS."""
    # str(), because format() would print a float32 of 2.1 with float64's digits, as 2.0999999046325684.
    try:
        shown = repr(value[: MAX_SHOWN_CHARACTERS + 1]) if isinstance(value, (str, bytes)) else str(value)
    except RecursionError:
        shown = "a value of too many levels"
    return shown if len(shown) <= MAX_SHOWN_CHARACTERS else f"{shown[:MAX_SHOWN_CHARACTERS]}..."


def decode(value: object) -> str:
    """Return the value, str or UTF-8 bytes, as text without lone surrogates, or raise BoundError."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            position = f"byte 0x{value[error.start]:02x} at offset {error.start}"
            raise BoundError(f"not UTF-8 ({position})", "UTF-8 text") from None
    if not isinstance(value, str):
        raise BoundError(show(value), "a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BoundError(f"half a character at {error.start}", "UTF-8 text") from None
    return value
