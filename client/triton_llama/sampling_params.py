"""What a caller can ask of the text: lengths, sampling, penalties, stop words.

Knows names, types and defaults. It doesn't know the bounds: the server checks them and names them in its refusal, so
that there is one copy of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from typing import Unpack


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords of `generate`."""

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


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is made; the defaults decode greedily, up to 128 tokens.

    Every field but `seed` may be None: that input is then left out of the request and the server takes the value from
    the checkpoint's generation config. The price under `scheduling: batch`: Triton only puts requests with the same
    set of inputs into one batch, so such a request shares batches only with others that leave out the same ones.
    """

    max_tokens: int | None = 128
    """Tokens to generate at most. Prompt and completion share the server's `max_model_len`: where 128 no longer fit,
    the request is refused; None takes the server's default, capped to what fits."""
    min_tokens: int | None = 0
    """No end token and no stop word ends the text before that many tokens."""
    temperature: float | None = 0.0
    """0 takes the likeliest token each time (greedy)."""
    top_k: int | None = 0
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float | None = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    repetition_penalty: float | None = 1.0
    """Divides the scores of tokens already present, the prompt's included; 1 is off."""
    frequency_penalty: float | None = 0.0
    """Taken off a token's score for each time it was generated; 0 is off."""
    presence_penalty: float | None = 0.0
    """Taken off a token's score once it was generated; 0 is off."""
    seed: int | None = None
    """Unsigned 64 bits; same seed, same request, same text. None: the client draws one for each request, so that the
    input is always present, and reports it in the completion."""
    stop_words: Sequence[str] | None = ()
    """The text ends before the first of these."""
    bad_words: Sequence[str] | None = ()
    """Strings that are never produced."""
    exclude_input_in_output: bool | None = True
    """False returns the prompt in front of the completion."""

    @classmethod
    def from_checkpoint(cls) -> SamplingParams:
        """Leave everything to the checkpoint's generation config (see the class about the price)."""
        return cls(
            max_tokens=None,
            min_tokens=None,
            temperature=None,
            top_k=None,
            top_p=None,
            repetition_penalty=None,
            frequency_penalty=None,
            presence_penalty=None,
            stop_words=None,
            bad_words=None,
            exclude_input_in_output=None,
        )

    def with_options(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """These parameters with some of them changed; an unknown name is a TypeError."""
        return replace(self, **options) if options else self
