"""The answer to one prompt. Knows nothing of how it travelled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """One prompt's answer."""

    text: str
    """The completion alone, or the prompt and the completion with `exclude_input_in_output=False`."""
    finish_reason: str
    """`stop` (end token or stop word) or `length` (`max_tokens` reached)."""
    num_input_tokens: int
    """Tokens of the prompt."""
    num_output_tokens: int
    """Tokens generated."""
    request_id: str
    """What the client called the request; the server's log names it so too."""
    seed: int
    """The seed sent, drawn by the client if the caller gave none: with it the same request gives the same text."""
