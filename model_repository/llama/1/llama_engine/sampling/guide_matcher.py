"""llguidance under this engine's limits: a vocabulary, and matchers that follow one completion each.

The process that checks guides imports this module, so it needs no PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from llama_engine.sampling.guide_grammar import GuideError, to_lark

_MESSAGE_LENGTH = 300

# Line and column of the grammar that was made of the guide.
_POSITION = re.compile(r"^((at )?\d+\(\d+\)|error): ")

MAX_LEXER_STATES = 50_000
"""Of one completion, 1 kB each. [\\p{L}\\p{N}]{1,2000} makes 33 a token."""

MAX_MASK_ITEMS = 10_000
"""Of the parser, in one mask: that takes up to 0.1 s. A choice of fifty objects of ten properties makes 3,000."""


class GuideMatchers:
    """Makes matchers over one vocabulary."""

    def __init__(self, tokens: Sequence[bytes], special_tokens: Collection[int], end_tokens: Sequence[int]) -> None:
        """tokens: bytes of each id, of special ones their names. end_tokens: at least one."""
        wrapper = TokenizerWrapper(_Vocabulary(tokens, special_tokens, end_tokens))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=list(end_tokens))
        self._names = {tokens[token].decode(errors="replace"): token for token in special_tokens}

    def check(self, kind: str, text: str) -> tuple[str, str]:
        """Return a guide's grammar, and what is wrong with it, one of them empty."""
        try:
            grammar = to_lark(kind, text, self._names)
        except GuideError as error:
            return "", str(error)[:_MESSAGE_LENGTH]
        matcher = self.matcher(grammar)
        # The first mask shows whether any text conforms.
        if not matcher.is_error():
            matcher.compute_bitmask()
        return ("", problem_of(matcher)) if matcher.is_error() else (grammar, "")

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of a completion; it may have an error. Drops the GIL while it compiles.

        None of its state is shared with others: limits that a completion exhausts are its own.
        """
        # Verbose errors quote the grammar and the parser's state.
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, step_max_items=MAX_MASK_ITEMS, verbose_errors=False)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)


def is_ruled_out(matcher: LLMatcher) -> bool:
    """Return whether a matcher's error is that its guide doesn't allow a token; not that it met one of its limits."""
    return "doesn't satisfy the grammar" in matcher.get_error()


def problem_of(matcher: LLMatcher) -> str:
    """Return a matcher's error so that it completes "guided_decoding_guide …", in one line."""
    lines = matcher.get_error().splitlines() or ["unknown error"]
    if lines[0].startswith("NoExtension"):
        return "allows no text"
    # In a malformed expression the reason follows a drawing of its position.
    reason = next((line for line in lines if line.startswith("error: ")), lines[0])
    return f"is refused: {_POSITION.sub('', reason)[:_MESSAGE_LENGTH]}"


class _Vocabulary:
    """What llguidance asks of a tokenizer. It encodes nothing, because masks follow bytes."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_tokens: Collection[int], end_tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special_tokens)
        self.eos_token_id = end_tokens[0]

    def __call__(self, text: bytes) -> list[int]:
        return []
