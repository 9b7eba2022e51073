"""Text to tokens: the checkpoint's own tokenizer, and its vocabulary as bytes for the way back."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from llama_engine.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Tokenizer:
    """The checkpoint's tokenizer. Encoding adds its special tokens (a Llama's BOS); decoding is the vocabulary's."""

    pretrained: PreTrainedTokenizerBase
    vocabulary: Vocabulary

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt, special tokens included."""
        # verbose=False: no warning of prompts beyond the tokenizer's own limit; the caller checks ours.
        tokens = tuple(self.pretrained(text, verbose=False)["input_ids"])
        bos = self.pretrained.bos_token_id
        # A rendered chat template brings its own BOS; with the tokenizer's there would be two, which no model was
        # trained on.
        return tokens[1:] if bos is not None and tokens[:2] == (bos, bos) else tokens
