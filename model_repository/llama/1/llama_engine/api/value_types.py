"""What single values a field of a request may have, and their Python form; `compound_types` has lists and objects.

A value comes from a tensor (NumPy scalars, bytes; arrays for lists) or from JSON. JSON's numbers and flags may also be
strings, as the clients of Triton's vLLM backend send them. A violation raises BoundError with the value and the bound.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

import numpy as np

SHOWN_CHARACTERS = 100
"""Of a value in an error message."""

_DECIMAL = re.compile(r"[+-]?[0-9.]{1,40}([eE][+-]?[0-9]{1,3})?", re.ASCII)


class BoundError(ValueError):
    """A value violates its bound; both as the message shows them."""

    def __init__(self, value: str, bound: str) -> None:
        self.value, self.bound = value, bound
        super().__init__(f"is {value}; it must be {bound}")


def show(value: object) -> str:
    """Return a value as a message shows it: cut, and strings in quotes."""
    # str: format() would print a float32 of 2.1 with float64's digits, as 2.0999999046325684.
    try:
        shown = repr(value[: SHOWN_CHARACTERS + 1]) if isinstance(value, (str, bytes)) else str(value)
    except RecursionError:
        shown = "a value of too many levels"
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."


class Bound(Protocol):
    """The bound of a field."""

    def parse(self, value: object) -> object:
        """Return the value in its Python form, or raise BoundError."""


@dataclass(frozen=True)
class Whole:
    """A whole number in [low, high]."""

    low: int | None = None
    high: int | None = None

    def parse(self, value: object) -> int:
        """Return the number, or raise BoundError."""
        number = value
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,20}", value, re.ASCII):
            number = int(value)
        inside = (
            isinstance(number, (int, np.integer))
            and not isinstance(number, bool)
            and (self.low is None or number >= self.low)
            and (self.high is None or number <= self.high)
        )
        if not inside:
            raise BoundError(show(value), f"a whole number{_limits(self.low, None, self.high)}")
        assert isinstance(number, (int, np.integer))
        return int(number)


@dataclass(frozen=True)
class Real:
    """A finite number: at least `low`, greater than `above`, at most `high`."""

    low: float | None = None
    above: float | None = None
    high: float | None = None

    def parse(self, value: object) -> float:
        """Return the number, or raise BoundError."""
        number = math.nan
        is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if is_number or (isinstance(value, str) and _DECIMAL.fullmatch(value)):
            number = _float(value)
        inside = (
            math.isfinite(number)
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
        )
        if not inside:
            raise BoundError(show(value), f"a finite number{_limits(self.low, self.above, self.high)}")
        return number


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def parse(self, value: object) -> bool:
        """Return the flag, or raise BoundError."""
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        if value in ("true", "True", "false", "False"):
            return value in ("true", "True")
        raise BoundError(show(value), "true or false")


@dataclass(frozen=True)
class Text:
    """UTF-8 text of at most `longest` bytes."""

    longest: int | None = None

    def parse(self, value: object) -> str:
        """Return the text, or raise BoundError."""
        text = decode(value)
        if self.longest is not None and len(text.encode()) > self.longest:
            raise BoundError(f"a text of {len(text.encode())} bytes", f"at most {self.longest} bytes")
        return text


@dataclass(frozen=True)
class OneOf:
    """One of some words; an empty one among them means none."""

    words: tuple[str, ...]

    def parse(self, value: object) -> str:
        """Return the word, or raise BoundError."""
        text = decode(value)
        if text not in self.words:
            raise BoundError(show(text), f"one of {', '.join(filter(None, self.words))}")
        return text


def decode(value: object) -> str:
    """Return text that UTF-8 can encode, or raise BoundError."""
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


def _float(value: object) -> float:
    """Return NaN for what no float can hold."""
    try:
        return float(value)  # type: ignore[arg-type]  # a number or a decimal string
    except (OverflowError, ValueError):
        return math.nan


def _limits(low: float | None, above: float | None, high: float | None) -> str:
    limits = [
        f"at least {low:g}" if low is not None else "",
        f"greater than {above:g}" if above is not None else "",
        f"at most {high:g}" if high is not None else "",
    ]
    given = " and ".join(filter(None, limits))
    return f", {given}" if given else ""
