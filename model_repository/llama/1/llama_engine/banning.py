"""Bad words: which tokens may not come next, so that a string never appears, however it would be split into tokens.

Banning the tokens of one tokenization, as is usual, leaves every other way to spell the word open. Here a token is
banned if the text so far followed by the token's bytes would contain the word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llama_engine.stopping import Transcript
from llama_engine.vocabulary import Vocabulary


class BannedWords:
    """One row's bad words (UTF-8, not empty) over a vocabulary."""

    def __init__(self, words: Sequence[bytes], vocabulary: Vocabulary, device: torch.device) -> None:
        self._words = words
        self._vocabulary = vocabulary
        self._device = device
        self._always = frozenset(token for word in words for token in vocabulary.containing(word))

    def tokens(self, transcript: Transcript) -> torch.Tensor:
        """Return the ids that would complete a bad word after this text: [n], long."""
        banned = set(self._always)
        for word in self._words:
            for begun in range(1, len(word)):
                if transcript.ends_with(word[:begun]):
                    banned.update(self._vocabulary.starting_with(word[begun:]))
        return torch.tensor(sorted(banned), dtype=torch.long, device=self._device)
