"""Parse raw inputs into validated requests.

The bounds of the contract with clients are in this module, except that of `stream`, which depends on Triton's config. A
violation raises InvalidRequest, which names the input, the value and the bound.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llama_engine.api.defaults import GenerationDefaults
from llama_engine.errors import InvalidRequest
from llama_engine.text.tokenizer import Tokenizer

_Number = TypeVar("_Number", int, float)

MAX_STOP_WORDS = 16
MAX_BAD_WORDS = 64
MAX_WORD_BYTES = 1024

RawInputs = Mapping[str, NDArray[Any]]
"""The inputs of one request by name: [rows, 1], or [rows, n] for stop_words and bad_words; strings as bytes."""


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to generate, with all defaults resolved and all values within bounds."""

    prompt: str
    prompt_tokens: tuple[int, ...] = field(repr=False)
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    stop_words: tuple[bytes, ...] = ()
    bad_words: tuple[bytes, ...] = ()
    exclude_input_in_output: bool = True


@dataclass(frozen=True)
class RequestParser:
    """Parses raw inputs under one server's limits and defaults."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    max_model_len: int

    def parse(self, inputs: RawInputs) -> list[GenerationRequest]:
        """Return one request per row of the inputs. Raises InvalidRequest for the first input that violates a bound."""
        prompts = inputs.get("text_input")
        if prompts is None:
            raise InvalidRequest("text_input is missing: it is the one input without a default")
        rows = prompts.shape[0] if prompts.ndim else 0
        if rows == 0:
            raise InvalidRequest(f"text_input has shape {list(prompts.shape)}; it must be [rows, 1], at least one row")
        for name, value in inputs.items():
            words = name in ("stop_words", "bad_words")
            if value.ndim != 2 or value.shape[0] != rows or (value.shape[1] != 1 and not words):
                expected = f"[{rows}, {'number of words' if words else 1}]"
                raise InvalidRequest(f"{name} has shape {list(value.shape)}; it must be {expected}")
        return [self._parse_row(_InputRow(inputs, row, f"row {row}: " if rows > 1 else "")) for row in range(rows)]

    def _parse_row(self, row: _InputRow) -> GenerationRequest:
        defaults = self.defaults
        prompt = row.text("text_input")
        tokens = self._encode(prompt, row)
        room = self.max_model_len - len(tokens)
        # Cap a default to the room left; accept or refuse an explicit value, never change it.
        max_tokens = row.number("max_tokens", min(defaults.max_tokens, room), low=1)
        if max_tokens > room:
            raise row.refusal(
                "max_tokens",
                max_tokens,
                f"at most {room}: the prompt has {len(tokens)} tokens, "
                f"and prompt and completion together may have {self.max_model_len}",
            )
        return GenerationRequest(
            prompt=prompt,
            prompt_tokens=tokens,
            max_tokens=max_tokens,
            min_tokens=row.number("min_tokens", min(defaults.min_tokens, max_tokens), low=0, high=max_tokens),
            temperature=row.number("temperature", defaults.temperature, low=0.0, high=2.0),
            top_k=row.number("top_k", defaults.top_k, low=0),
            top_p=row.number("top_p", defaults.top_p, above=0.0, high=1.0),
            repetition_penalty=row.number("repetition_penalty", defaults.repetition_penalty, above=0.0),
            frequency_penalty=row.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
            presence_penalty=row.number("presence_penalty", 0.0, low=-2.0, high=2.0),
            seed=row.number("seed", secrets.randbits(64), low=0),
            stop_words=row.words("stop_words", MAX_STOP_WORDS),
            bad_words=row.words("bad_words", MAX_BAD_WORDS),
            exclude_input_in_output=row.flag("exclude_input_in_output", True),
        )

    def _encode(self, prompt: str, row: _InputRow) -> tuple[int, ...]:
        limit = self.max_model_len - 1
        bound = f"at most {limit} tokens (max_model_len - 1)"
        if not prompt:
            raise row.refusal("text_input", "''", "a text of at least one token")
        # Refuse a prompt too long for even the longest tokens before spending time on tokenization.
        size = len(prompt.encode())
        if size > limit * self.tokenizer.vocabulary.longest:
            raise row.refusal("text_input", f"a text of {size} bytes", bound)
        tokens = self.tokenizer.encode(prompt)
        if len(tokens) > limit:
            raise row.refusal("text_input", f"{len(tokens)} tokens", bound)
        if not tokens:
            raise row.refusal("text_input", repr(prompt), "a text of at least one token")
        unknown = next((token for token in tokens if token >= len(self.tokenizer.vocabulary.token_bytes)), None)
        if unknown is not None:
            raise row.refusal("text_input", f"token {unknown}", f"below {len(self.tokenizer.vocabulary.token_bytes)}")
        return tokens


@dataclass(frozen=True)
class _InputRow:
    """One row of the raw inputs. prefix: of error messages, names the row of several."""

    inputs: RawInputs
    index: int
    prefix: str

    def refusal(self, name: str, value: object, bound: str) -> InvalidRequest:
        """Return the error of an input that violates a bound."""
        # !s: format() would print a float32 of 2.1 with float64's digits, as 2.0999999046325684.
        return InvalidRequest(f"{self.prefix}{name} is {value!s}; it must be {bound}")

    def text(self, name: str) -> str:
        return self._decode(name, self.inputs[name][self.index, 0])

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.inputs[name][self.index, 0]) if name in self.inputs else default

    def number(
        self,
        name: str,
        default: _Number,
        *,
        low: float | None = None,
        above: float | None = None,
        high: float | None = None,
    ) -> _Number:
        """Return the input's value in the default's type, or the default, which was checked when it was loaded."""
        if name not in self.inputs:
            return default
        value = self.inputs[name][self.index, 0]
        inside = (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)
        if not np.isfinite(value) or not inside:
            bounds = [
                f"at least {low:g}" if low is not None else "",
                f"greater than {above:g}" if above is not None else "",
                f"at most {high:g}" if high is not None else "",
            ]
            kind = "a finite number" if isinstance(default, float) else "a whole number"
            raise self.refusal(name, value, f"{kind}, {' and '.join(filter(None, bounds))}")
        return type(default)(value)

    def words(self, name: str, limit: int) -> tuple[bytes, ...]:
        """Return the words in UTF-8. Empty words are ignored: clients pad lists of unequal length with them."""
        if name not in self.inputs:
            return ()
        words = [self._decode(name, word).encode() for word in self.inputs[name][self.index] if word]
        if len(words) > limit:
            raise self.refusal(name, f"a list of {len(words)} words", f"at most {limit} words")
        for word in words:
            if len(word) > MAX_WORD_BYTES:
                raise self.refusal(
                    name, f"a list with a word of {len(word)} bytes", f"of words of at most {MAX_WORD_BYTES} bytes"
                )
        return tuple(words)

    def _decode(self, name: str, value: bytes | str) -> str:
        if isinstance(value, str):
            return value
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise self.refusal(
                name, f"not UTF-8 (byte 0x{value[error.start]:02x} at offset {error.start})", "UTF-8 text"
            ) from None
