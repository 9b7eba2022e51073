"""Per-sequence logits processing: a bias before the penalties, and masks after them.

Masked tokens are: all but `allowed_token_ids`, end tokens before min_tokens, tokens that would complete a bad word, and
tokens that the guide excludes. A sequence that has only min_tokens needs no `LogitsProcessor`: the sampler masks end
tokens of all such sequences at once.

The usual approach to bad words, masking the tokens of one tokenization, misses the string's other tokenizations. Here a
token is masked if the text followed by the token's bytes would contain the string.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from llama_engine.errors import InvalidRequest
from llama_engine.kernels.transfers import to_device
from llama_engine.text.partial_match import PartialMatch
from llama_engine.text.tokenizer import Vocabulary

if TYPE_CHECKING:
    from llama_engine.guides.matcher import GuideState


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
        """Append the bytes of a token, sampled or resumed, to the text."""
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


class LogitsProcessor:
    """Applies the bias and the masks of one sequence to its logits. Not thread-safe."""

    def __init__(
        self,
        vocabulary: int,
        device: torch.device,
        *,
        logit_bias: Iterable[tuple[int, float]] = (),
        allowed: Collection[int] = (),
        ends: Collection[int] = (),
        stops: Collection[int] = (),
        ignored: Collection[int] = (),
        bad_words: BadWords | None = None,
    ) -> None:
        """vocabulary: number of tokens. allowed: ids; empty allows all. ends: ids of tokens that finish the sequence.

        The guide knows only the checkpoint's end tokens; two sets correct its masks. stops: ids of `ends` that are no
        end tokens of the checkpoint. ignored: end tokens of the checkpoint that don't finish the sequence.
        """
        self._vocabulary, self._device = vocabulary, device
        self._biased = to_device([token for token, _ in logit_bias], device, torch.long)
        self._biases = to_device([bias for _, bias in logit_bias], device, torch.float32)
        self._ends = to_device(sorted(ends), device, torch.long)
        self._forbidden: torch.Tensor | None = None
        if allowed:
            self._forbidden = torch.ones(vocabulary, dtype=torch.bool, device=device)
            self._forbidden[to_device(list(allowed), device, torch.long)] = False
        self._bad_words = bad_words
        self._guided_ends = tuple(ends), tuple(stops), tuple(ignored)
        self._guide: GuideState | None = None
        self.problem: InvalidRequest | None = None
        """Error of the guide if it allows no token or exceeds its limits; else None."""

    def follow_guide(self, guide: GuideState) -> None:
        """Apply a guide to all further tokens. Must be called before the first token."""
        self._guide = guide
        self._end_bits, self._stop_bits, self._ignored_bits = (
            _bits(self._vocabulary, tokens) for tokens in self._guided_ends
        )

    def clone(self) -> LogitsProcessor:
        """Return a processor for another choice of the request. Must be called before `follow_guide` and `append`.

        The clone shares stateless data, because the tables of many bad words take tenths of a second to build.
        """
        other = copy(self)
        if self._bad_words is not None:
            other._bad_words = self._bad_words.clone()
        return other

    @property
    def has_bias(self) -> bool:
        """Whether the request has a logit bias."""
        return len(self._biased) > 0

    @property
    def is_guided(self) -> bool:
        """Whether the sequence has a guide, so that `fill` computes a part of its masks."""
        return self._guide is not None

    @property
    def is_complete(self) -> bool:
        """Whether the text satisfies the guide and can't be continued; False without a guide."""
        return self._guide is not None and self._guide.finished

    def forced_text(self) -> str:
        """Return the text that the guide forces next, without an incomplete character; empty without a guide."""
        return "" if self._guide is None else self._guide.forced_bytes().decode(errors="ignore")

    def bias(self, logits: torch.Tensor) -> None:
        """Add the bias to the logits, [vocabulary], in place."""
        logits[self._biased] += self._biases

    def fill(self, allowed: NDArray[np.int32]) -> None:
        """Write the bit mask of the tokens that the guide allows, on the host; of none if the guide fails (`problem`).

        allowed: as for `GuideState.fill`. Tokens that finish the sequence are allowed only where the text may end. Each
        call takes time of the guide's limit.
        """
        assert self._guide is not None, "there is no guide"
        try:
            self._guide.fill(allowed)
        except InvalidRequest as error:
            self.problem = error
            allowed.fill(0)
            return
        if self._guide.may_end:
            allowed &= ~self._ignored_bits
            allowed |= self._end_bits
        else:
            allowed &= ~self._stop_bits

    def mask(self, logits: torch.Tensor, too_early: bool) -> None:
        """Mask logits [vocabulary] in place. The guide's mask from `fill` must already be applied.

        too_early: whether the text has less than min_tokens. If the masks leave no token, end tokens are allowed even
        then, unless the guide doesn't let the text end: in that case the sequence fails.
        """
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, -torch.inf)
        if too_early:
            logits[self._ends] = -torch.inf
        if self._bad_words is not None:
            logits[self._bad_words.always] = -torch.inf
            logits[self._bad_words.completing()] = -torch.inf
        parts = (self._forbidden, self._bad_words, self._guide)
        masks = too_early or self.has_bias or any(part is not None for part in parts)
        if masks and (self._guide is None or (self.problem is None and self._guide.may_end)):
            logits[self._ends] = torch.where(logits.amax() == -torch.inf, 0.0, logits[self._ends])

    def leaves_nothing(self, too_early: bool) -> bool:
        """Return whether the masks leave no token. Recomputes them to explain a failed sequence; not used in steps."""
        logits = torch.zeros(self._vocabulary, device=self._device)
        if self.is_guided:
            allowed = np.empty(-(-self._vocabulary // 32), dtype=np.int32)
            self.fill(allowed)
            ruled_out = forbidden(torch.from_numpy(allowed[None]), self._vocabulary)[0]
            logits.masked_fill_(ruled_out.to(self._device), -torch.inf)
        self.mask(logits, too_early)
        return logits.amax().item() == -torch.inf

    def append(self, token: int, token_bytes: bytes) -> bool:
        """Append the sampled token and its bytes; return whether the guide allows it. `problem` may say why not."""
        if self._bad_words is not None:
            self._bad_words.append(token_bytes)
        try:
            return self._guide is None or self._guide.accept(token)
        except InvalidRequest as error:
            self.problem = error
            return False


def _bits(vocabulary: int, tokens: Iterable[int]) -> NDArray[np.int32]:
    """Return the bit mask of token ids: [ceil(vocabulary / 32)]; token t is bit t % 32 of word t // 32."""
    chosen = np.zeros(-(-vocabulary // 32) * 32, dtype=np.bool_)
    chosen[list(tokens)] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)


def forbidden(allowed: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Unpack the bit masks of guides: return which tokens are not allowed, [batch, vocabulary], bool.

    allowed: [batch, ceil(vocabulary / 32)], int32, in the format of `GuideState.fill`; on any device.
    """
    if allowed.device.type == "cpu":
        bits = np.unpackbits(allowed.numpy().view(np.uint8), axis=-1, count=vocabulary, bitorder="little")
        return torch.from_numpy(bits == 0)
    places = torch.arange(32, dtype=torch.int32, device=allowed.device)
    return ((allowed[:, :, None] >> places) & 1).flatten(1)[:, :vocabulary] == 0
