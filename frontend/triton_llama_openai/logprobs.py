"""Log probabilities in OpenAI's two forms, from the model's JSON, and their bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from triton_llama_openai.engine_client import TokenLogprobs
from triton_llama_openai.errors import invalid
from triton_llama_openai.protocol import SamplingRequest

MAX_PROMPT_LOGPROBS = 1 << 19
"""In one answer: tokens of all prompts, times completions of each, times alternatives and the token itself."""

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON doesn't have; vLLM's value."""

Entry = tuple[str, float]


def _entries(token: TokenLogprobs) -> list[Entry]:
    """Return text and logprob of a token's alternatives, the token itself first."""
    return [(str(entry.get("decoded_token") or ""), _finite(entry.get("logprob"))) for entry in token.values()]


def _finite(value: object) -> float:
    return max(float(value), MIN_LOGPROB) if isinstance(value, int | float) else MIN_LOGPROB


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
    likeliest: dict[str, float] = {}
    for text, logprob in sorted(entries, key=lambda entry: -entry[1]):
        likeliest.setdefault(text, logprob)
    return likeliest


def check_prompt_logprobs(
    request: SamplingRequest, prompts: Sequence[str | list[int]], top: int | None, context: int
) -> None:
    """Refuse more log probabilities of prompts than one answer may have. top: alternatives of each token."""
    if top is None:
        return
    # A text has no more tokens than bytes.
    sizes = [len(prompt.encode() if isinstance(prompt, str) else prompt) for prompt in prompts]
    count = sum(min(size, context) for size in sizes) * request.choices * (top + 1)
    if count > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        value = f"up to {count} log probabilities of the prompts' tokens"
        raise invalid(field, value, f"at most {MAX_PROMPT_LOGPROBS} in one request")
