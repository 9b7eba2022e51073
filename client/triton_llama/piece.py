"""A piece of a completion while it is being generated. Knows nothing of how it travelled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """What has been generated since the piece before; `str()` of it is its text."""

    text: str
    """One token's text or several tokens'; whole characters only, and possibly empty in the last piece."""
    finish_reason: str
    """Empty until the last piece, which has `stop` (end token or stop word) or `length` (`max_tokens` reached)."""
    num_input_tokens: int
    """Tokens of the prompt, in the last piece; 0 before."""
    num_output_tokens: int
    """Tokens generated since the piece before; over all pieces they add up to the completion's."""

    def __str__(self) -> str:
        return self.text
