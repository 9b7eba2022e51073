"""Sampling parameters of a request: names, types and defaults. The server checks the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypedDict, Unpack


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    stop_words: Sequence[str] | None
    bad_words: Sequence[str] | None
    exclude_input_in_output: bool | None


class Options(SamplingOptions, total=False):
    """The keywords of `generate` and `stream`: fields of `SamplingParams`, and seconds in place of the client's."""

    timeout: float | None


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one completion; the defaults decode greedily, up to 128 tokens.

    Every field but `seed` may be None: the request then lacks that input and the server takes the value from the
    checkpoint's generation config. The price under `scheduling: batch`: Triton batches only requests with the same set
    of inputs, so such a request shares batches only with others that lack the same ones.
    """

    max_tokens: int | None = 128
    """Tokens to generate at most. Prompt and completion share the server's `max_model_len`: where 128 no longer fit,
    the request is refused; None takes the server's default, capped to what fits."""
    min_tokens: int | None = 0
    """No end token and no stop string ends the text before that many tokens."""
    temperature: float | None = 0.0
    """0 takes the likeliest token each time (greedy)."""
    top_k: int | None = 0
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float | None = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    repetition_penalty: float | None = 1.0
    """Divides the scores of tokens already present, the prompt's included; 1 is off."""
    frequency_penalty: float | None = 0.0
    """Subtracted from a token's score for each time it was generated; 0 is off."""
    presence_penalty: float | None = 0.0
    """Subtracted from a token's score once it was generated; 0 is off."""
    seed: int | None = None
    """Unsigned 64 bits; same seed, same request, same text. None: the client draws one for each request, so that the
    input is always present, and reports it in the completion."""
    stop_words: Sequence[str] | None = ()
    """The text ends before the first of these strings."""
    bad_words: Sequence[str] | None = ()
    """Strings that are never generated."""
    exclude_input_in_output: bool | None = True
    """False returns the prompt in front of the completion."""

    @classmethod
    def from_checkpoint(cls) -> SamplingParams:
        """Leave everything to the checkpoint's generation config; see the class for the price."""
        return cls(**{field.name: None for field in fields(cls)})

    def with_options(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return these parameters with some of them changed; an unknown name is a TypeError."""
        return replace(self, **options) if options else self
