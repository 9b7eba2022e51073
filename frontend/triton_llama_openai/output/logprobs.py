"""The log probabilities of an answer, as the three paths write them."""

from __future__ import annotations

from collections.abc import Iterable

from triton_llama.completion import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON doesn't have; vLLM's value."""


def logprobs_content(
    tokens: Iterable[TokenLogprobs], top: int, unknown_bytes: list[int] | None = None
) -> list[dict[str, object]]:
    """Return tokens as a chat and a response have them. top: alternatives of each. unknown_bytes: stands for them."""
    content: list[dict[str, object]] = []
    for token in tokens:
        entries = _text_and_logprob(token)
        if not entries:
            continue
        # The token itself is among the alternatives if it is one of the likeliest.
        likeliest = [_logprob(entry, unknown_bytes) for entry in sorted(entries, key=lambda entry: -entry[1])[:top]]
        content.append({**_logprob(entries[0], unknown_bytes), "top_logprobs": likeliest})
    return content


def _logprob(entry: tuple[str, float], unknown_bytes: list[int] | None) -> dict[str, object]:
    text, logprob = entry
    # A token that is part of a character: its text doesn't say which bytes.
    octets = unknown_bytes if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": octets}


class CompletionLogprobs:
    """The logprobs of a completion's choice, as four lists; it counts the characters of the text before.

    first_token: the text of the prompt's first token, which has no log probability.
    """

    def __init__(self, first_token: str = "") -> None:
        self._first_token = first_token
        self._offset = 0

    def add(self, tokens: Iterable[TokenLogprobs | None]) -> dict[str, object]:
        """Return the lists of these tokens; None is the prompt's first token, which has no probability."""
        texts: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token in tokens:
            entries = _text_and_logprob(token) if token else []
            text = entries[0][0] if entries else self._first_token
            texts.append(text)
            logprobs.append(entries[0][1] if entries else None)
            top.append(_by_text(entries) if entries else None)
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _by_text(entries: list[tuple[str, float]]) -> dict[str, float]:
    """Return texts with their logprobs; of two tokens with the same text, the likelier one's."""
    likeliest: dict[str, float] = {}
    for text, logprob in sorted(entries, key=lambda entry: -entry[1]):
        likeliest.setdefault(text, logprob)
    return likeliest


def _text_and_logprob(token: TokenLogprobs) -> list[tuple[str, float]]:
    """Return text and logprob of a token, then of its alternatives, likeliest first.

    MIN_LOGPROB stands for a missing or lower logprob.
    """
    entries = []
    for entry in token.values():
        logprob = entry.get("logprob")
        finite = max(float(logprob), MIN_LOGPROB) if isinstance(logprob, int | float) else MIN_LOGPROB
        entries.append((str(entry.get("decoded_token") or ""), finite))
    return entries
