"""The model with other tokens: each is a part of a character, or of one and the next; none is whole but a space."""

from __future__ import annotations

from dataclasses import replace

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim
from llama_engine.model.loader import Checkpoint, load_checkpoint
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer, Vocabulary
from real_model import TritonPythonModel
from torch import device

__all__ = ["TritonPythonModel"]

PARTS = (b"\xf0\x9f", b"\x90\x8d", b"\xc3", b"\xa9", b"\xf0", b"\x9f\x90\x8d", b"\x8d \xf0\x9f\x90", b" ")
"""Of a snake, an e with an accent and a space. Most ways to put them together are no UTF-8 at all."""


def _load_split(settings: Settings, where: device) -> Checkpoint:
    checkpoint = load_checkpoint(settings, where)
    tokenizer = checkpoint.tokenizer
    # 7 has no divisor in common with 8: neighbours in the vocabulary, which often follow one another, are different.
    pieces = [PARTS[7 * token % len(PARTS)] for token in range(len(tokenizer.vocabulary.token_bytes))]
    return replace(checkpoint, tokenizer=Tokenizer(tokenizer.pretrained, Vocabulary(pieces)))


real_model.load_checkpoint = _load_split
