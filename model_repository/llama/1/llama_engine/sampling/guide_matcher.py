"""llguidance under this engine's limits: a vocabulary, and states that follow one completion each."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from llama_engine.errors import InvalidRequest
from llama_engine.sampling.guide_grammar import GuideError, to_lark

if TYPE_CHECKING:
    # The process that checks guides imports this module, and needs no NumPy.
    import numpy as np
    from numpy.typing import NDArray

MAX_LEXER_STATES = 50_000
"""Maximum lexer states of a completion, 1 kB each. [\\p{L}\\p{N}]{1,2000} makes 33 a token."""

MAX_MASK_ITEMS = 10_000
"""Maximum parser items of one mask (up to 0.1 s). A choice of fifty objects of ten properties makes 3,000."""

MASK_SECONDS, MASK_SECONDS_PER_TOKEN = 0.25, 0.003
"""Processor time that the masks of one completion may take: all others of the batch wait. An ordinary one takes 5 to
50 µs, and one of [\\p{L}\\p{N} ]{1,2000} over 128,000 tokens 0.9 ms; those of ambiguous grammars
(root ::= root root | "a") take ever longer.
"""

_MESSAGE_LENGTH = 300
_NAME = "guided_decoding_guide "
_FAILED = f"{_NAME}can't be followed to its end: it "

# Line and column of the grammar that was made of the guide.
_POSITION = re.compile(r"^((at )?\d+\(\d+\)|error): ")


class GuideState:
    """How far one completion has followed its guide. Not thread-safe; neither method touches the device."""

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
            raise InvalidRequest(_FAILED, _problem_of(self._matcher))
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
        if not conforms and "doesn't satisfy the grammar" not in self._matcher.get_error():
            raise InvalidRequest(_FAILED, _problem_of(self._matcher))
        return conforms


class GuideMatchers:
    """Compiles grammars over one vocabulary."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_tokens: Sequence[int], end_tokens: Sequence[int]) -> None:
        """tokens: bytes of each id, of special ones their names. end_tokens: at least one."""
        self._names = {tokens[token].decode(errors="replace"): token for token in special_tokens}
        # What llguidance reads of a tokenizer.
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_tokens, end_tokens[0]
        self._tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=len(tokens), eos_token=list(end_tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Return no tokens: masks follow bytes, and llguidance encodes nothing."""
        return []

    def check(self, kind: str, text: str) -> str:
        """Return a guide's grammar. Raises InvalidRequest."""
        try:
            grammar = to_lark(kind, text, self._names)
        except GuideError as error:
            raise InvalidRequest(_NAME, str(error)[:_MESSAGE_LENGTH]) from None
        matcher = self._matcher(grammar)
        # The first mask shows whether any text conforms.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest(_NAME, _problem_of(matcher))
        return grammar

    def start(self, grammar: str) -> GuideState:
        """Return the state at the beginning of a completion; its limits are its own. Drops the GIL to compile."""
        return GuideState(self._matcher(grammar))

    def _matcher(self, grammar: str) -> LLMatcher:
        # Verbose errors quote the grammar and the parser's state.
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, step_max_items=MAX_MASK_ITEMS, verbose_errors=False)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)


def _problem_of(matcher: LLMatcher) -> str:
    """Return a matcher's error so that it completes "guided_decoding_guide …", in one line."""
    lines = matcher.get_error().splitlines() or ["unknown error"]
    if lines[0].startswith("NoExtension"):
        return "allows no text"
    # In a malformed expression the reason follows a drawing of its position.
    reason = next((line for line in lines if line.startswith("error: ")), lines[0])
    return f"is refused: {_POSITION.sub('', reason)[:_MESSAGE_LENGTH]}"
