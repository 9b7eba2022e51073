"""Checks guides in another process, so that a hostile guide can exhaust only that process's time, memory or stack.

llguidance bounds most work, but not all: some intersections of regular expressions take exponential time to compile,
and a long chain of rules overflows the stack, which ends the process. A guide that passes here is compiled once more by
the process that generates, whose threads have a larger stack.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING

from llama_engine.errors import GenerationError, InvalidRequest

if TYPE_CHECKING:
    from llama_engine.sampling.guide_matcher import GuideMatchers

COMPILE_SECONDS = 2.0
"""Processor time that a guide may take to compile: ordinary ones take milliseconds."""

START_SECONDS = 30.0
"""How long the process may take to start: it imports llguidance and indexes the vocabulary."""

_MEMORY_BYTES, _STACK_BYTES = 1 << 30, 1 << 20

_log = logging.getLogger(__name__)


class GuideChecker:
    """The checking process. It starts with the first guide, and again after a guide has killed it. Not thread-safe."""

    def __init__(self, tokens: Sequence[bytes], special_tokens: Sequence[int], end_tokens: Sequence[int]) -> None:
        """tokens: bytes of each id, of special ones their names."""
        self._vocabulary = tokens, special_tokens, end_tokens
        self._pool: ProcessPoolExecutor | None = None

    def check(self, kind: str, text: str) -> str:
        """Return a guide's grammar. Raises InvalidRequest; GenerationError if the process doesn't start."""
        pool = self._running_pool()
        try:
            return pool.submit(_check, kind, text, COMPILE_SECONDS).result()
        except BrokenProcessPool:
            limits = f"{COMPILE_SECONDS:g} s, {_MEMORY_BYTES >> 20} MiB of memory or {_STACK_BYTES >> 20} MiB of stack"
            raise InvalidRequest(f"guided_decoding_guide takes more than {limits} to compile; simplify it") from None

    def close(self) -> None:
        """End the process, after the check in progress."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _running_pool(self) -> ProcessPoolExecutor:
        """Return a pool whose process runs."""
        if self._pool is not None:
            try:
                self._pool.submit(os.getpid).result()
                return self._pool
            except BrokenProcessPool:
                # By the guide before, or killed while it was idle.
                self._pool = None
        pool = ProcessPoolExecutor(1, get_context("spawn"), _initialize, self._vocabulary)
        try:
            pool.submit(os.getpid).result(START_SECONDS)
        except (BrokenProcessPool, OSError) as error:
            _log.exception("the process that checks guides can't be started")
            raise GenerationError("guided decoding is unavailable; the server's log has the reason") from error
        self._pool = pool
        return pool


_matchers: GuideMatchers
"""The process's."""


def _initialize(tokens: Sequence[bytes], special_tokens: Sequence[int], end_tokens: Sequence[int]) -> None:
    global _matchers
    # Of this thread, too: the kernel looks at the limit when a stack grows.
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Sent to the process group, they end the process that started this one, and so this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The model's own threads come first.
    os.nice(5)
    from llama_engine.sampling.guide_matcher import GuideMatchers

    _matchers = GuideMatchers(tokens, special_tokens, end_tokens)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _check(kind: str, text: str, seconds: float) -> str:
    # SIGPROF ends this process.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return _matchers.check(kind, text)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
