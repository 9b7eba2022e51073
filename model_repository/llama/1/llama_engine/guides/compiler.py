"""Structured output: a guide constrains a completion by masking all tokens that would violate it.

A guide is checked once, in a separate process, and compiled for each completion, because copies of a compiled guide
would share their limits. A background thread does both, one guide at a time, so that steps aren't delayed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from llama_engine.errors import InvalidRequest
from llama_engine.guides.checker import GuideChecker

if TYPE_CHECKING:
    from llama_engine.guides.matcher import GuideMatchers, GuideState
    from llama_engine.text.tokenizer import Tokenizer

MAX_CACHED_GUIDES = 256
_INSTALL = "pip install 'llguidance>=1.9,<2'"

_log = logging.getLogger(__name__)


class Guides:
    """Checks and compiles the guides of one checkpoint's requests. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Iterable[int], finds_forced: bool = True) -> None:
        """end_tokens: ids allowed where a text may end. finds_forced: as of `GuideMatchers.start`.

        llguidance is loaded with the first guide, not here.
        """
        self._tokenizer, self._end_tokens, self._finds_forced = tokenizer, sorted(end_tokens), finds_forced
        self._thread = ThreadPoolExecutor(1, "guides")
        self._matchers: GuideMatchers | None = None
        self._checker: GuideChecker | None = None
        # The grammar of each (kind, text), or the error of a refused guide; the newest last.
        self._checked: dict[tuple[str, str], str | InvalidRequest] = {}

    def start(self, kind: str, text: str) -> Future[GuideState]:
        """Check and compile a guide in the background; return a future of the state at the beginning of a completion.

        kind, text: guided_decoding_guide_type and guided_decoding_guide; the text is ignored for the kind `json`. The
        future raises InvalidRequest if the guide is refused, llguidance isn't installed or the checkpoint has no end
        token, and GenerationError if the checking process can't be started. Most guides take milliseconds, none more
        than COMPILE_SECONDS of CPU time.
        """
        return self._thread.submit(self._compile, kind, "" if kind == "json" else text)

    def close(self) -> None:
        """Cancel queued guides and end the checking process; a compilation in progress continues to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._checker is not None:
            self._checker.close()

    def _compile(self, kind: str, text: str) -> GuideState:
        matchers, checker = self._load()
        if (kind, text) not in self._checked:
            if len(self._checked) == MAX_CACHED_GUIDES:
                del self._checked[next(iter(self._checked))]
            try:
                self._checked[kind, text] = checker.check(kind, text)
            except InvalidRequest as error:
                self._checked[kind, text] = error
        checked = self._checked[kind, text]
        if isinstance(checked, InvalidRequest):
            raise checked.with_traceback(None)
        return matchers.start(checked, self._finds_forced)

    def _load(self) -> tuple[GuideMatchers, GuideChecker]:
        """Load llguidance and index the vocabulary at the first guide; return the matchers and the checker."""
        if self._matchers is not None and self._checker is not None:
            return self._matchers, self._checker
        try:
            from llama_engine.guides.matcher import GuideMatchers
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
        vocabulary = tokens, sorted(special), self._end_tokens
        self._matchers, self._checker = GuideMatchers(*vocabulary), GuideChecker(*vocabulary)
        return self._matchers, self._checker
