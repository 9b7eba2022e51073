"""Structured output: masks of the tokens that may come next, so that a completion conforms to a guide.

    guides = Guides(tokenizer, end_tokens)               one per engine
    state = guides.start("json_schema", '{"type": …}')   one per completion, not on the engine's thread
    state.fill(allowed)              before each token: bits of the tokens that may come, [ceil(vocabulary / 32)]
    logits.masked_fill_(forbidden(allowed, vocabulary), -torch.inf)                     all guided rows at once
    state.accept(token)              after each token; `finished` once nothing may follow

`accept` and `fill` take some microseconds of the host for most guides (up to a millisecond for a long repetition of all
letters, over 128,000 tokens) and don't touch the device: the sampler calls `fill` while a GPU runs the forward pass.

`start` blocks its thread: some milliseconds for most guides, and about 2 s for a hostile one that was not seen before.
Every completion compiles its guide again: a millisecond for most, and up to a second for one of 128 kB.
Sequences that run are not affected: llguidance releases the GIL, and a new guide is checked by another process. But
whatever waits behind this thread is; `start_soon` returns at once, or doesn't start the guide.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from llama_engine.errors import InvalidRequest, Unavailable
from llama_engine.sampling.guide_worker import CheckedGuide, GuideWorker

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from llama_engine.sampling.guide_matcher import GuideMatchers
    from llama_engine.text.tokenizer import Tokenizer

SOON_SECONDS = 0.02
"""Processor time to compile a guide that `start_soon` starts: nearly all take less."""

MASK_SECONDS, MASK_SECONDS_PER_TOKEN = 0.25, 0.003
"""Processor time that the masks of one completion may take: all others of the batch wait. An ordinary one takes 5 to
50 µs, and one of [\\p{L}\\p{N} ]{1,2000} over 128,000 tokens 0.9 ms; those of ambiguous grammars
(root ::= root root | "a") take ever longer.
"""

_FAILED = "guided_decoding_guide can't be followed to its end: it "
_KEPT_GUIDES = 256
_INSTALL = "pip install 'llguidance>=1.9,<2'"

_log = logging.getLogger(__name__)


def forbidden(allowed: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return which tokens may not come: [rows, vocabulary], bool, to mask logits with.

    allowed: [rows, ceil(vocabulary / 32)], int32, the bits that `GuideState.fill` sets; on any device.
    """
    if allowed.device.type == "cpu":
        bits = np.unpackbits(allowed.numpy().view(np.uint8), axis=-1, count=vocabulary, bitorder="little")
        return torch.from_numpy(bits == 0)
    places = torch.arange(32, dtype=torch.int32, device=allowed.device)
    return ((allowed[:, :, None] >> places) & 1).flatten(1)[:, :vocabulary] == 0


class GuideState:
    """How far one completion has followed its guide. Not thread-safe."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_tokens = 0
        self._seconds = 0.0

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the text may end here. `fill` then allows the checkpoint's end tokens."""
        return self._matcher.is_accepting()

    def fill(self, allowed: NDArray[np.int32]) -> None:
        """Set the bit of every token that may come next, and clear the others. Can be repeated.

        allowed: [ceil(vocabulary / 32)], contiguous; token t is bit t % 32 of word t // 32. Raises InvalidRequest if no
        token may come, or the guide is too complex to follow from here: the completion can't go on.
        """
        # Not the time that passes: both calls drop the GIL and wait for it.
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        self._seconds += time.thread_time() - began
        if self._matcher.is_error():
            from llama_engine.sampling.guide_matcher import problem_of

            raise InvalidRequest(_FAILED, problem_of(self._matcher))
        if self._seconds > MASK_SECONDS + self._num_tokens * MASK_SECONDS_PER_TOKEN:
            raise InvalidRequest(f"{_FAILED}took {self._seconds:.2g} s for {self._num_tokens} tokens; simplify it")

    def accept(self, token: int) -> bool:
        """Append a token; return whether the guide allows it. After False the completion can't go on.

        Raises InvalidRequest, as `fill`, if the guide is too complex to follow from here.
        """
        began = time.thread_time()
        conforms = self._matcher.consume_token(token)
        self._seconds += time.thread_time() - began
        self._num_tokens += 1
        if not conforms:
            from llama_engine.sampling.guide_matcher import is_ruled_out, problem_of

            if not is_ruled_out(self._matcher):
                raise InvalidRequest(_FAILED, problem_of(self._matcher))
        return conforms


class Guides:
    """The guides of one checkpoint: each is checked once, in another process, and kept. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Iterable[int]) -> None:
        """end_tokens: allowed where a text may end. Loads nothing: most servers never see a guide."""
        self._tokenizer, self._end_tokens = tokenizer, sorted(end_tokens)
        # Guards the two of _load, and checks: the worker does one at a time.
        self._checking = threading.Lock()
        self._matchers: GuideMatchers | None = None
        self._worker: GuideWorker | None = None
        # Refused guides stay refused: repeating one costs nothing.
        self._kept: OrderedDict[tuple[str, str], CheckedGuide] = OrderedDict()
        self._closed = False

    def start(self, kind: str, text: str) -> GuideState:
        """Return the state at the beginning of a completion. May block for seconds.

        kind, text: guided_decoding_guide_type and guided_decoding_guide, the latter ignored for the kind `json`.
        Raises InvalidRequest with what is wrong with the guide, or what to install, Unavailable if the machine has no
        time to check it or the server stops, GenerationError if the process that checks it doesn't start.
        """
        key = _key(kind, text)
        # Each completion compiles it once more, without the GIL: copies of a matcher share limits.
        return self._start(self._kept.get(key) or self._check(*key))

    def start_soon(self, kind: str, text: str) -> GuideState | None:
        """Do as `start` if that takes some milliseconds at most; else return None."""
        guide = self._quick(kind, text)
        return None if guide is None else self._start(guide)

    def starts_soon(self, kind: str, text: str) -> bool:
        """Whether `start` takes some milliseconds at most."""
        return self._quick(kind, text) is not None

    def close(self) -> None:
        """End the process that checks guides, and a check that it does; later ones raise Unavailable."""
        self._closed = True
        worker = self._worker
        if worker is not None:
            worker.close()

    def _quick(self, kind: str, text: str) -> CheckedGuide | None:
        guide = self._kept.get(_key(kind, text))
        return None if guide is None or guide.seconds > SOON_SECONDS else guide

    def _start(self, guide: CheckedGuide) -> GuideState:
        if guide.problem:
            raise InvalidRequest("guided_decoding_guide ", guide.problem)
        if guide.exhausted:
            raise InvalidRequest(f"guided_decoding_guide {guide.exhausted}; simplify it")
        assert self._matchers is not None, "a guide was checked without"
        return GuideState(self._matchers.matcher(guide.grammar))

    def _check(self, kind: str, text: str) -> CheckedGuide:
        with self._checking:
            # Another thread may have checked it meanwhile.
            if guide := self._kept.get((kind, text)):
                return guide
            worker = self._load()
            if self._closed:
                raise Unavailable("the server is stopping")
            guide = self._kept[kind, text] = worker.check(kind, text)
            if len(self._kept) > _KEPT_GUIDES:
                self._kept.popitem(last=False)
            return guide

    def _load(self) -> GuideWorker:
        """Index the vocabulary, for this process and the worker's, at the first guide."""
        if self._worker is not None:
            return self._worker
        try:
            from llama_engine.sampling.guide_matcher import GuideMatchers
        except ImportError as error:
            _log.error("a request asks for guided decoding, which needs llguidance: %s", error)
            raise InvalidRequest(
                f"guided_decoding_guide needs the package llguidance, which this server lacks: {_INSTALL}"
            ) from error
        if not self._end_tokens:
            raise InvalidRequest("guided_decoding_guide needs an end token, and this checkpoint has none")
        tokens = list(self._tokenizer.vocabulary.token_bytes)
        special = {
            index: added.content.encode()
            for index, added in self._tokenizer.pretrained.added_tokens_decoder.items()
            if index < len(tokens) and not tokens[index]
        }
        for index, name in special.items():
            tokens[index] = name
        self._matchers = GuideMatchers(tokens, special, self._end_tokens)
        self._worker = GuideWorker(tokens, special, self._end_tokens)
        return self._worker


def _key(kind: str, text: str) -> tuple[str, str]:
    return kind, "" if kind == "json" else text
