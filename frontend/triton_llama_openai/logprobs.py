"""Log probabilities in OpenAI's two forms, from the model's JSON."""

from __future__ import annotations

from collections.abc import Iterable

from triton_llama_openai.engine_client import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON doesn't have; vLLM's value."""

Entry = tuple[str, float]


def _entries(token: TokenLogprobs) -> list[Entry]:
    """Return text and logprob of a token's alternatives, the token itself first."""
    return [(str(found.get("decoded_token") or ""), _finite(found.get("logprob"))) for found in token.values()]


def _finite(value: object) -> float:
    return max(float(value), LOWEST) if isinstance(value, int | float) else LOWEST


def chat_logprobs(tokens: Iterable[TokenLogprobs], top: int) -> list[dict[str, object]]:
    """Return the `content` of a chat choice's logprobs; `top`: alternatives of each token."""
    content = []
    for token in tokens:
        entries = _entries(token)
        if not entries:
            continue
        # The token itself is among the alternatives if it is one of the likeliest.
        likeliest = sorted(entries, key=lambda entry: -entry[1])[:top]
        content.append({**_chat_entry(entries[0]), "top_logprobs": [_chat_entry(entry) for entry in likeliest]})
    return content


def _chat_entry(entry: Entry) -> dict[str, object]:
    text, logprob = entry
    # A token that is part of a character: its text doesn't say which bytes.
    octets = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": octets}


class CompletionLogprobs:
    """The logprobs of a completion's choice, as four lists; it counts the characters of the text before.

    first_token: the text of the prompt's first token, of which the model says nothing.
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
            entries = _entries(token) if token else []
            text = entries[0][0] if entries else self._first_token
            texts.append(text)
            logprobs.append(entries[0][1] if entries else None)
            top.append(_by_text(entries) if entries else None)
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _by_text(entries: list[Entry]) -> dict[str, float]:
    """Return texts with their logprobs; of two tokens with the same text, the likelier one's."""
    found: dict[str, float] = {}
    for text, logprob in sorted(entries, key=lambda entry: -entry[1]):
        found.setdefault(text, logprob)
    return found
