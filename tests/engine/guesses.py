"""Drafts of a test's choice: a sequence's own next tokens up to a random place, then wrong ones."""

import random
from collections.abc import Callable

from llama_engine.engine.drafts import MAX_DRAFT, Draft, Drafter
from llama_engine.engine.engine import Engine
from llama_engine.engine.sequence import Sequence

Foretell = Callable[[Sequence], list[int]]
"""Returns all tokens that a sequence will have."""


def eager_drafter(engine: Engine) -> Drafter:
    """The engine's drafter, changed so that it verifies every guess beside any number of sequences."""
    assert engine._drafter is not None
    engine._drafter.limit = 100
    engine._drafter._budget.best_count = lambda _, probabilities, gain: len(probabilities)  # type: ignore[assignment, method-assign]
    return engine._drafter


def guess_at_random(engine: Engine, foretell: Foretell, randomness: random.Random) -> list[Draft]:
    """Let steps verify drafts of random lengths, half of them with a wrong token; return the growing list of them."""
    drafts: list[Draft] = []
    vocabulary = range(len(engine.tokenizer.vocabulary.token_bytes))

    def guess(sequence: Sequence, room: int) -> Draft | None:
        room = min(room, MAX_DRAFT, sequence.request.max_tokens - sequence.num_output_tokens - 1)
        if room <= 0 or sequence.result is not None:
            return None
        length = randomness.randint(0, min(room, 9))
        tokens = foretell(sequence)[sequence.num_output_tokens :][:length]
        tokens += randomness.choices(vocabulary, k=length - len(tokens))
        if tokens and randomness.random() < 0.5:
            tokens[randomness.randrange(length)] = randomness.choice(vocabulary)
        if not tokens:
            return None
        drafter._updated(sequence)
        drafts.append(Draft(tokens, "text", 3))
        return drafts[-1]

    drafter = eager_drafter(engine)
    drafter._guess = guess  # type: ignore[method-assign]
    return drafts
