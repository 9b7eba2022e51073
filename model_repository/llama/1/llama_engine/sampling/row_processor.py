"""Per-sequence logits processing: a bias before the penalties, and masks after them.

A mask excludes tokens: all but `allowed_token_ids`, tokens that would end the text before min_tokens or complete a bad
word, and tokens that the guide rules out. A sequence that needs at most min_tokens, which the sampler masks for all
rows at once, has no `RowProcessor`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from llama_engine.api.generation_request import GenerationRequest
from llama_engine.errors import InvalidRequest
from llama_engine.sampling.logits_processors import forbidden
from llama_engine.text.bad_words import BadWords
from llama_engine.text.tokenizer import Vocabulary
from llama_engine.transfer import to_device

if TYPE_CHECKING:
    from llama_engine.sampling.guide_matcher import GuideState


class RowProcessor:
    """The bias and the masks of one sequence's logits."""

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
        """vocabulary: number of tokens. allowed: empty allows all. ends: tokens that finish the sequence.

        Beside a guide (`follow_guide`): stops, those of `ends` that the guide takes for text; ignored: tokens that the
        guide takes for ends, and that are none.
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
        """Why no token may come next, where the guide rules all of them out or is too complex to follow."""

    def follow_guide(self, guide: GuideState) -> None:
        """Apply a guide to all tokens; to be called before the first one."""
        self._guide = guide
        self._end_bits, self._stop_bits, self._ignored_bits = (
            _bits(self._vocabulary, tokens) for tokens in self._guided_ends
        )

    def clone(self) -> RowProcessor:
        """Return a processor for another choice of the request, before this one has a guide or a token.

        The two share their stateless parts: the tables of many bad words take tenths of a second to build.
        """
        other = copy(self)
        if self._bad_words is not None:
            other._bad_words = self._bad_words.clone()
        return other

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias."""
        return len(self._biased) > 0

    @property
    def is_guided(self) -> bool:
        """Whether there is a guide, and `fill` part of the masks."""
        return self._guide is not None

    @property
    def is_complete(self) -> bool:
        """Whether there is a guide, and the text satisfies it and can't be continued."""
        return self._guide is not None and self._guide.finished

    def bias(self, logits: torch.Tensor) -> None:
        """Add the bias to the logits, [vocabulary], in place."""
        logits[self._biased] += self._biases

    def fill(self, allowed: NDArray[np.int32]) -> None:
        """Set the bit of every token that the guide allows, and clear the others: on the host, and can be repeated.

        allowed: as for `GuideState.fill`. Tokens that end the text are allowed where it may end, and only there.
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
        """Mask the logits, [vocabulary], of tokens that must not come next, in place; a guide has masked them already.

        too_early: before min_tokens. Where no token is left, the text can only end, even then. Where a guide doesn't
        let it end, nothing is left, and the sequence fails.
        """
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, -torch.inf)
        if too_early:
            logits[self._ends] = -torch.inf
        if self._bad_words is not None:
            logits[self._bad_words.always] = -torch.inf
            logits[self._bad_words.completing()] = -torch.inf
        if self._guide is None or (self.problem is None and self._guide.may_end):
            logits[self._ends] = torch.where(logits.amax() == -torch.inf, 0.0, logits[self._ends])

    def leaves_nothing(self, too_early: bool) -> bool:
        """Return whether the masks leave no token: the reason why a sequence failed, not part of a step."""
        logits = torch.zeros(self._vocabulary, device=self._device)
        if self.is_guided:
            allowed = np.empty(-(-self._vocabulary // 32), dtype=np.int32)
            self.fill(allowed)
            ruled_out = forbidden(torch.from_numpy(allowed[None]), self._vocabulary)[0]
            logits.masked_fill_(ruled_out.to(self._device), -torch.inf)
        self.mask(logits, too_early)
        return logits.amax().item() == -torch.inf

    def append(self, token: int, token_bytes: bytes) -> bool:
        """Take the sampled token and its bytes; return whether the text can go on by the guide, else see `problem`."""
        if self._bad_words is not None:
            self._bad_words.append(token_bytes)
        try:
            return self._guide is None or self._guide.accept(token)
        except InvalidRequest as error:
            self.problem = error
            return False


def _bits(vocabulary: int, tokens: Iterable[int]) -> NDArray[np.int32]:
    """Return the bits of some tokens: [ceil(vocabulary / 32)]; token t is bit t % 32 of word t // 32."""
    chosen = np.zeros(-(-vocabulary // 32) * 32, dtype=np.bool_)
    chosen[list(tokens)] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)


def row_processor(
    request: GenerationRequest,
    vocabulary: Vocabulary,
    end_tokens: frozenset[int],
    device: torch.device,
) -> RowProcessor | None:
    """Return the processor of a request, without its guide; None if the request needs none.

    end_tokens: the checkpoint's end tokens.
    """
    asks = (
        request.logit_bias
        or request.allowed_token_ids
        or request.bad_words
        or request.guided_decoding_guide_type
        # min_tokens masks other tokens than in the rows that the sampler masks together.
        or (request.min_tokens and (request.stop_token_ids or request.ignore_eos))
    )
    if not asks:
        return None
    stops = set(request.stop_token_ids)
    return RowProcessor(
        len(vocabulary.token_bytes),
        device,
        logit_bias=request.logit_bias,
        allowed=request.allowed_token_ids,
        ends=stops if request.ignore_eos else stops | end_tokens,
        stops=stops - end_tokens,
        ignored=end_tokens - stops if request.ignore_eos else (),
        bad_words=BadWords(request.bad_words, vocabulary, device) if request.bad_words else None,
    )
