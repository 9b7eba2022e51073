"""Bad words: which tokens may not come next, so that a string never appears, however it would be split into tokens.

Banning the tokens of one tokenization, as is usual, leaves every other way to spell the word open. Here a token is
banned if the text so far followed by the token's bytes would contain the word. How much of each word the text ends
with is kept up to date, so a step costs what its token is long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llama_engine.text.partial_match import PartialMatch
from llama_engine.text.vocabulary import Vocabulary


class BadWords:
    """One row's bad words (UTF-8, not empty) over a vocabulary, and how far the row's text has got into each."""

    def __init__(self, words: Sequence[bytes], vocabulary: Vocabulary, device: torch.device) -> None:
        self._words = [PartialMatch(word) for word in words]
        self._vocabulary = vocabulary
        self._device = device
        always = {token for word in words for token in vocabulary.containing(word)}
        self.always = self._ids(always)
        """Ids that contain a whole bad word: [n], long."""

    def advance(self, piece: bytes) -> None:
        """Take the bytes of the token that was produced."""
        for word in self._words:
            word.advance(piece)

    def completing(self) -> torch.Tensor:
        """Return the ids that would complete a bad word that the text has begun: [n], long, most often none."""
        completing: set[int] = set()
        for word in self._words:
            for rest in word.rests(self._vocabulary.longest):
                completing.update(self._vocabulary.starting_with(rest))
        return self._ids(completing)

    def _ids(self, tokens: set[int]) -> torch.Tensor:
        return torch.tensor(sorted(tokens), dtype=torch.long, device=self._device)
