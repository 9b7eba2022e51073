"""Wraps llguidance with limits: `GuideMatchers` compiles grammars, `GuideState` follows one completion."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from llama_engine.errors import InvalidRequest
from llama_engine.guides.translation import GuideError, to_lark

if TYPE_CHECKING:
    # The process that checks guides imports this module, and needs no NumPy.
    import numpy as np
    from numpy.typing import NDArray

MAX_LEXER_STATES = 50_000
"""Maximum lexer states of a completion, 1 kB each. The regular expression [\\p{L}\\p{N}]{1,2000} adds 33 per token."""

MAX_MASK_ITEMS = 10_000
"""Maximum parser items of one mask (up to 0.1 s). A choice of fifty objects of ten properties takes 3,000."""

MASK_SECONDS, MASK_SECONDS_PER_TOKEN = 0.25, 0.003
"""Maximum CPU time for the masks of one completion, at the start and per token; the whole batch waits for a mask. A
mask usually takes 5 to 50 µs, and 0.9 ms for [\\p{L}\\p{N} ]{1,2000} over 128,000 tokens. Ambiguous grammars
(root ::= root root | "a") take more time with each token.
"""

MAX_FORCED_BYTES, MAX_FORCED_ITEMS, FORCED_SECONDS = 200, 1000, 0.1
"""Bounds for the text that a guide forces: its length, the parser's items for it, and CPU time for one completion. They
bound the cost of drafts."""

_MESSAGE_LENGTH = 300
_NAME = "guided_decoding_guide "
_FAILED = f"{_NAME}can't be followed to its end: it "

# Line and column refer to the generated grammar, which the client doesn't know.
_POSITION = re.compile(r"^(((at )?\d+\(\d+\)|error): )+")


class ForcedText:
    """The text that a guide forces, by a matcher of its own: finding it changes the matcher, and spends its limits."""

    def __init__(self, matcher: LLMatcher | None) -> None:
        """matcher: at the beginning of the completion; None finds no text."""
        self._matcher = matcher
        self._tokens: list[int] = []
        self._seconds = 0.0

    def append(self, token: int) -> None:
        """Append a token that the guide allows."""
        if self._matcher is not None:
            self._tokens.append(token)

    def next(self) -> bytes:
        """Return the beginning of the bytes that every continuation has; empty also beyond the limits."""
        began = time.thread_time()
        matcher, tokens = self._matcher, self._tokens
        self._tokens = []
        if matcher is None or not matcher.consume_tokens(tokens):
            self._matcher = None
            return b""
        forced = bytes(matcher.compute_ff_bytes()[:MAX_FORCED_BYTES])
        self._seconds += time.thread_time() - began
        if matcher.is_error() or self._seconds > FORCED_SECONDS:
            self._matcher = None
        # This byte begins the name of a special token.
        return forced.partition(b"\xff")[0]


class GuideState:
    """The state of one completion in its guide's grammar. Runs on the CPU. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, forced: ForcedText) -> None:
        self._matcher, self._forced = matcher, forced
        self._num_tokens = 0
        self._seconds = 0.0

    @property
    def finished(self) -> bool:
        """Whether the text is complete and only an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the text may end here. `fill` then allows the checkpoint's end tokens."""
        return self._matcher.is_accepting()

    def forced_bytes(self) -> bytes:
        """Return bytes that every continuation begins with, if they are found in time. It changes no mask and limit."""
        return self._forced.next()

    def fill(self, allowed: NDArray[np.int32]) -> None:
        """Write the bit mask of allowed next tokens. The guide's state doesn't change; the time spent counts.

        allowed: [ceil(vocabulary / 32)], contiguous; token t is bit t % 32 of word t // 32. Raises InvalidRequest if no
        token is allowed or the guide exceeds its limits; the completion can't continue then.
        """
        # Measure CPU time: wall time includes waiting for the GIL.
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        self._seconds += time.thread_time() - began
        if self._matcher.is_error():
            raise InvalidRequest(_FAILED, _problem_of(self._matcher))
        if self._seconds > MASK_SECONDS + self._num_tokens * MASK_SECONDS_PER_TOKEN:
            raise InvalidRequest(f"{_FAILED}took {self._seconds:.2g} s for {self._num_tokens} tokens; simplify it")

    def accept(self, token: int) -> bool:
        """Append a token; return whether the guide allows it. After False the completion can't continue.

        Raises InvalidRequest if the guide exceeds its limits.
        """
        began = time.thread_time()
        conforms = self._matcher.consume_token(token)
        self._seconds += time.thread_time() - began
        self._num_tokens += 1
        self._forced.append(token)
        if not conforms and "doesn't satisfy the grammar" not in self._matcher.get_error():
            raise InvalidRequest(_FAILED, _problem_of(self._matcher))
        return conforms


class GuideMatchers:
    """Compiles grammars over one vocabulary."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_tokens: Sequence[int], end_tokens: Sequence[int]) -> None:
        """tokens: bytes of each token id, or the name of a special token. end_tokens: ids, at least one."""
        self._names = {tokens[token].decode(errors="replace"): token for token in special_tokens}
        # The attributes that llguidance reads of a tokenizer.
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_tokens, end_tokens[0]
        self._tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=len(tokens), eos_token=list(end_tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Return no tokens. llguidance's tokenizer interface requires this, but masks without forcing never encode."""
        return []

    def check(self, kind: str, text: str) -> str:
        """Return the grammar of a guide. Raises InvalidRequest if it is malformed or no text conforms to it."""
        try:
            grammar = to_lark(kind, text, self._names)
        except GuideError as error:
            raise InvalidRequest(_NAME, str(error)[:_MESSAGE_LENGTH]) from None
        matcher = self._matcher(grammar)
        # The first mask fails if no text conforms.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest(_NAME, _problem_of(matcher))
        return grammar

    def start(self, grammar: str, finds_forced: bool = True) -> GuideState:
        """Return the initial state of a completion, with limits of its own. Releases the GIL while compiling.

        finds_forced: whether `GuideState.forced_bytes` finds text, which takes a second matcher.
        """
        forced = self._matcher(grammar, MAX_FORCED_ITEMS) if finds_forced else None
        return GuideState(self._matcher(grammar), ForcedText(forced))

    def _matcher(self, grammar: str, max_items: int = MAX_MASK_ITEMS) -> LLMatcher:
        # Verbose errors would quote the grammar and the parser's state.
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, step_max_items=max_items, verbose_errors=False)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)


def _problem_of(matcher: LLMatcher) -> str:
    """Return a matcher's error in one line, worded to follow "guided_decoding_guide"."""
    lines = matcher.get_error().splitlines() or ["unknown error"]
    if lines[0].startswith("NoExtension"):
        return "allows no text"
    # For a malformed expression the reason follows lines that point to its position.
    reason = next((line for line in lines if line.startswith("error: ")), lines[0])
    return f"is refused: {_POSITION.sub('', reason)[:_MESSAGE_LENGTH]}"
