"""The checkpoint's tokenizer: encodes prompts; `vocabulary` maps tokens back to bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llama_engine.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Tokenizer:
    """A transformers tokenizer (`pretrained`) and its vocabulary as bytes."""

    pretrained: PreTrainedTokenizerBase
    vocabulary: Vocabulary

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt, including the tokenizer's special tokens (a Llama's BOS)."""
        # verbose=False: no warning about prompts beyond the tokenizer's own limit; the caller checks ours.
        tokens = tuple(self.pretrained(text, verbose=False)["input_ids"])
        bos = self.pretrained.bos_token_id
        # A rendered chat template contains a BOS; the tokenizer adds another. No model was trained on two.
        return tokens[1:] if bos is not None and tokens[:2] == (bos, bos) else tokens
