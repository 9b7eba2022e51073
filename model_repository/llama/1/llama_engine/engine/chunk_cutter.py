"""Cuts the text of a sequence into the chunks of its stream."""

from __future__ import annotations

import math
import time

from llama_engine.engine.events import Chunk
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.detokenizer import Detokenizer


class ChunkCutter:
    """Cuts the text of one sequence. interval: tokens per chunk after the first one."""

    def __init__(self, request: GenerationRequest, detokenizer: Detokenizer, interval: int) -> None:
        self._request, self._detokenizer, self._interval = request, detokenizer, interval
        self._num_tokens = 0
        self._next_at = -math.inf

    def skip(self) -> None:
        """Leave the text so far out: the client has it."""
        self._detokenizer.next_delta()
        self._num_tokens = self._detokenizer.num_tokens

    def next(self) -> Chunk | None:
        """Return the next chunk; None if none is due yet.

        The text is final: it excludes a possible beginning of a stop string and an incomplete character.
        """
        request, detokenizer = self._request, self._detokenizer
        pending = detokenizer.num_tokens - self._num_tokens
        # The first chunk ignores the intervals, which must not increase TTFT.
        waits = self._num_tokens > 0 and not detokenizer.finish_reason
        if pending < (self._interval if waits else 1) or (waits and time.monotonic() < self._next_at):
            return None
        text = detokenizer.next_delta()
        if not self._num_tokens and not request.exclude_input_in_output:
            text = request.prompt + text
        if not text and not detokenizer.finish_reason:
            return None
        self._num_tokens = detokenizer.num_tokens
        if request.stream_interval_ms:
            self._next_at = time.monotonic() + request.stream_interval_ms / 1000
        return Chunk(text, pending, request.choice)
