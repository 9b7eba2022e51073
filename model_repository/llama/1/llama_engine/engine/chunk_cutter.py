"""Cuts the text of a sequence into the chunks of its stream."""

from __future__ import annotations

import math
import time

from llama_engine.engine.events import Chunk
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.output_text import OutputText


class ChunkCutter:
    """Cuts the text of one sequence. interval: tokens per chunk after the first one."""

    def __init__(self, request: GenerationRequest, output: OutputText, interval: int) -> None:
        self._request, self._output, self._interval = request, output, interval
        self._num_tokens = 0
        self._next_at = -math.inf

    def skip(self) -> None:
        """Leave the text so far out: the client has it."""
        self._output.next_delta()
        self._num_tokens = self._output.num_tokens

    def next(self) -> Chunk | None:
        """Return the next chunk; None if none is due yet.

        The text is final: it excludes a possible beginning of a stop string and an incomplete character.
        """
        request, output = self._request, self._output
        pending = output.num_tokens - self._num_tokens
        # The first chunk ignores the intervals, which must not increase TTFT.
        waits = self._num_tokens > 0 and not output.finish_reason
        if pending < (self._interval if waits else 1) or (waits and time.monotonic() < self._next_at):
            return None
        text = output.next_delta()
        if not self._num_tokens and not request.exclude_input_in_output:
            text = request.prompt + text
        if not text and not output.finish_reason:
            return None
        self._num_tokens = output.num_tokens
        if request.stream_interval_ms:
            self._next_at = time.monotonic() + request.stream_interval_ms / 1000
        return Chunk(text, pending, request.choice)
