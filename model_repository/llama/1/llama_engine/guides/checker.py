"""Checks guides in a separate process, so that a hostile guide exhausts the time, memory or stack of that process only.

llguidance's limits don't cover everything: some intersections of regular expressions take exponential time to compile,
and a long chain of rules overflows the stack, which kills the process. A guide that passes is compiled again in the
model's process, whose threads have a larger stack.
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
    from llama_engine.guides.matcher import GuideMatchers

COMPILE_SECONDS = 2.0
"""Maximum CPU time for compiling a guide; ordinary guides take milliseconds."""

START_SECONDS = 30.0
"""Maximum time for starting the process, which imports llguidance and indexes the vocabulary."""

_MEMORY_BYTES, _STACK_BYTES = 1 << 30, 1 << 20

_log = logging.getLogger(__name__)


class GuideChecker:
    """Runs the checking process. It starts with the first guide and after a guide has killed it. Not thread-safe."""

    def __init__(self, tokens: Sequence[bytes], special_tokens: Sequence[int], end_tokens: Sequence[int]) -> None:
        """tokens: bytes of each token id, or the name of a special token. special_tokens, end_tokens: ids."""
        self._vocabulary = tokens, special_tokens, end_tokens
        self._pool: ProcessPoolExecutor | None = None

    def check(self, kind: str, text: str) -> str:
        """Return a guide's Lark grammar. Raises InvalidRequest if it is refused, GenerationError without a process."""
        pool = self._running_pool()
        try:
            return pool.submit(_check, kind, text, COMPILE_SECONDS).result()
        except BrokenProcessPool:
            limits = f"{COMPILE_SECONDS:g} s, {_MEMORY_BYTES >> 20} MiB of memory or {_STACK_BYTES >> 20} MiB of stack"
            raise InvalidRequest(f"guided_decoding_guide takes more than {limits} to compile; simplify it") from None

    def close(self) -> None:
        """End the process after the check in progress."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _running_pool(self) -> ProcessPoolExecutor:
        """Return a pool with a running process; start one if necessary."""
        if self._pool is not None:
            try:
                self._pool.submit(os.getpid).result()
                return self._pool
            except BrokenProcessPool:
                # The previous guide killed the process, or it died while idle.
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
"""The matchers of the checking process; set by `_initialize`."""


def _initialize(tokens: Sequence[bytes], special_tokens: Sequence[int], end_tokens: Sequence[int]) -> None:
    global _matchers
    # The limit applies to this running thread, too: the kernel checks it when a stack grows.
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Signals to the process group also reach the parent, whose end ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Give the model's threads priority.
    os.nice(5)
    from llama_engine.guides.matcher import GuideMatchers

    _matchers = GuideMatchers(tokens, special_tokens, end_tokens)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _check(kind: str, text: str, seconds: float) -> str:
    # When the CPU time is used up, SIGPROF kills this process.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return _matchers.check(kind, text)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
