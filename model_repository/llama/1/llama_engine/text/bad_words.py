"""Bad words: masks the tokens that would complete a forbidden string in the text.

The usual approach, masking the tokens of one tokenization, misses the string's other tokenizations. Here a token is
masked if the text followed by the token's bytes would contain the string.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch

from llama_engine.text.partial_match import PartialMatch
from llama_engine.text.tokenizer import Vocabulary
from llama_engine.transfer import to_device


class BadWords:
    """Finds the tokens that would complete a bad word in one sequence's text. words: UTF-8, not empty.

    Matching is incremental (KMP over bytes): a step reads the bytes of its token, not the text again.
    """

    def __init__(self, words: Sequence[bytes], vocabulary: Vocabulary, device: torch.device) -> None:
        self._words = [PartialMatch(word) for word in words]
        self._vocabulary = vocabulary
        self._device = device
        always = {token for word in words for token in vocabulary.containing(word)}
        self.always = self._ids(always)
        """Ids of the tokens that contain a whole bad word: [n], long."""

    def clone(self) -> BadWords:
        """Return bad words for another sequence of the same request. Must be called before the first `append`."""
        other = copy(self)
        other._words = [copy(word) for word in self._words]
        return other

    def append(self, token_bytes: bytes) -> None:
        """Append the bytes of the sampled token to the text."""
        for word in self._words:
            word.append(token_bytes)

    def completing(self) -> torch.Tensor:
        """Return the ids of tokens that would complete a partial match at the text's end: [n], long, usually empty."""
        completing: set[int] = set()
        for word in self._words:
            for remainder in word.remainders(self._vocabulary.longest):
                completing.update(self._vocabulary.starting_with(remainder))
        return self._ids(completing)

    def _ids(self, tokens: set[int]) -> torch.Tensor:
        return to_device(sorted(tokens), self._device, torch.long)
