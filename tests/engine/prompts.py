"""Prompts: parts of the language reference that every Python contains."""

import random
from functools import cache
from pydoc_data.topics import topics

from llama_engine.text.tokenizer import Tokenizer


@cache
def reference_text() -> str:
    return "\n".join(topics[name] for name in sorted(topics))


def random_prompt(tokenizer: Tokenizer, lengths: range, randomness: random.Random) -> tuple[str, tuple[int, ...]]:
    """Return a prompt with a random number of tokens from `lengths`, as text and as tokens."""
    length = randomness.choice(lengths)
    start = randomness.randrange(len(reference_text()) - 12 * length)
    tokens = tokenizer.encode(reference_text()[start : start + 12 * length])[:length]
    text = tokenizer.pretrained.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(text, str)
    return text, tokens
