"""The verification of a receipt: whether its tokens are those that the server draws."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triton_llama.errors import ServerError

VERIFICATION = "verification"
"""The model's output."""


@dataclass(frozen=True)
class Candidate:
    """A token, its text and its logit, before bias and penalties."""

    token_id: int
    text: str
    logit: float


@dataclass(frozen=True)
class Difference:
    """The first token of a receipt that isn't the server's, and the one that the server draws instead."""

    claimed: Candidate
    drawn: Candidate


@dataclass(frozen=True)
class Verification:
    """What a server has found when it computed the tokens of a receipt again."""

    equal: bool
    """Whether all tokens are the server's, and its text ends with the last one."""
    tokens: int
    """Equal tokens, before the first difference if there is one."""
    finish_reason: str
    """`stop` or `length` where the server's text ends with these tokens; else empty."""
    difference: Difference | None = None
    """None if all tokens are equal, and if the receipt's text goes on after the end of the server's."""


def read_verification(outputs: Mapping[str, object]) -> Verification:
    """Check the output of a response. Raises ServerError if it is missing or isn't what the contract says."""
    text = outputs.get(VERIFICATION)
    try:
        values = json.loads(text)  # type: ignore[arg-type]  # refused with TypeError
        pair = values.pop("difference", None)
        difference = None if pair is None else Difference(Candidate(**pair["claimed"]), Candidate(**pair["drawn"]))
        return Verification(**values, difference=difference)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ServerError(f"the server's output {VERIFICATION} is {str(text)[:80]!r}, must be a verification") from None


def only(verifications: Sequence[Verification]) -> Verification:
    """Return the verification of the only response. Raises ServerError if there are none or several."""
    if len(verifications) != 1:
        raise ServerError(f"the server sent {len(verifications)} responses to a receipt, must be one")
    return verifications[0]
