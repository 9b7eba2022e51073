"""Guides of the embedded checkpoint, and the texts that a guide's masks allow."""

import json
import string
from collections.abc import Callable, Iterator

import pytest
import torch
from engine.engines import engine_of
from llama_engine.engine.engine import Engine
from llama_engine.guides.compiler import Guides
from llama_engine.guides.matcher import GuideState
from llama_engine.model.loader import LoadedModel
from llama_engine.sampling.bias_and_masks import forbidden
from llama_engine.text.tokenizer import Tokenizer

END = 2
EngineOf = Callable[..., Engine]
"""Makes an engine of a checkpoint, slots and settings."""

# Exponential: more than 10 s and 1 GB.
ENDLESS = json.dumps(
    {"allOf": [{"type": "string", "pattern": f".*{letter}.{{20}}"} for letter in string.ascii_lowercase]}
)


FUNCTION_CALL = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=f>", "schema": {"type": "object"}, "end": "</function>"}],
    "triggers": ["<function="],
}


def tag(form: object) -> str:
    """A structural tag of XGrammar's format."""
    return json.dumps({"type": "structural_tag", "format": form})


@pytest.fixture
def own_guides(tokenizer: Tokenizer) -> Iterator[Guides]:
    """A guides of the embedded checkpoint that no other test has used."""
    guides = Guides(tokenizer, [END])
    yield guides
    guides.close()


@pytest.fixture(scope="module")
def engine_with_guides(tokenizer: Tokenizer) -> Iterator[EngineOf]:
    """Makes engines of the embedded tokenizer. They share a process that checks guides, which takes a second."""
    guides = Guides(tokenizer, [END])

    def make(checkpoint: LoadedModel, slots: int = 32, **parameters: str) -> Engine:
        engine = engine_of(checkpoint, slots, **parameters)
        engine.guides = guides
        return engine

    yield make
    guides.close()


def allowed_tokens(state: GuideState, tokenizer: Tokenizer) -> set[int]:
    size = len(tokenizer.vocabulary.token_bytes)
    mask = torch.full((1, -(-size // 32)), -1, dtype=torch.int32)
    state.fill(mask[0].numpy())
    return set((~forbidden(mask, size))[0].nonzero()[:, 0].tolist())


def tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Split a text into the longest tokens from its start on."""
    by_bytes = {token: index for index, token in enumerate(tokenizer.vocabulary.token_bytes) if token}
    rest, tokens = text.encode(), []
    while rest:
        length = next(
            size for size in range(min(len(rest), tokenizer.vocabulary.longest), 0, -1) if rest[:size] in by_bytes
        )
        tokens.append(by_bytes[rest[:length]])
        rest = rest[length:]
    return tokens


def conforms(state: GuideState, text: str, tokenizer: Tokenizer) -> bool:
    """Return whether the masks allow the text and an end token after it."""
    for token in tokens_of(text, tokenizer):
        if token not in allowed_tokens(state, tokenizer):
            return False
        assert state.accept(token)
    return END in allowed_tokens(state, tokenizer)
