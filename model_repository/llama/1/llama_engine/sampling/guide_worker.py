"""A process that checks guides: what a hostile one exhausts, time, memory or the stack, is this process's.

llguidance bounds most work, but not all: some intersections of regular expressions take exponential time to compile,
and a long chain of rules overflows the stack, which ends the process. A guide that passes here is compiled once more by
the process that generates, with at least twice this stack.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from llama_engine.errors import GenerationError, Unavailable

COMPILE_SECONDS = 2.0
"""Processor time that one guide may take to compile: ordinary ones take milliseconds."""

ANSWER_SECONDS = 10.0
"""How long that may last on a machine that does other work."""

START_SECONDS = 30.0
"""How long the process may take to start: it imports llguidance and indexes the vocabulary."""

_END_SECONDS = 1.0
_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 1 << 20

_BOOT = """
import sys
sys.path[:0] = sys.argv[2:]
from llama_engine.sampling.guide_worker import serve
serve(int(sys.argv[1]))
"""

_log = logging.getLogger(__name__)


class CheckedGuide(NamedTuple):
    """A guide's grammar, or what is wrong with it. seconds: processor time to compile it.

    problem: may quote the guide. exhausted: what it takes too much of.
    """

    grammar: str
    problem: str = ""
    seconds: float = 0.0
    exhausted: str = ""


class GuideWorker:
    """The process, started with the first guide and again after one that ended it. Not thread-safe."""

    def __init__(self, tokens: Sequence[bytes], special_tokens: Collection[int], end_tokens: Sequence[int]) -> None:
        """tokens: bytes of each id, of special ones their names."""
        self._vocabulary = (list(tokens), sorted(special_tokens), list(end_tokens))
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False

    def check(self, kind: str, text: str) -> CheckedGuide:
        """Check a guide.

        Raises GenerationError if the process doesn't start, Unavailable if it is killed or gets too little processor
        time.
        """
        if self._process is not None and self._process.poll() is not None:
            # It ended while it was idle; that is not this guide's fault.
            self.stop()
        connection = self._connection or self._start()
        try:
            connection.send((kind, text, COMPILE_SECONDS))
            if connection.poll(ANSWER_SECONDS):
                return CheckedGuide(*json.loads(connection.recv_bytes()))
        except (EOFError, ConnectionError):
            code = self.stop()
            if code in (-signal.SIGKILL, -signal.SIGTERM):
                self._refuse_if_closed()
                raise Unavailable("the process that checks guides was killed; try again") from None
            if code == -signal.SIGPROF:
                exhausted = f"takes longer than {COMPILE_SECONDS:g} s to compile"
            else:
                exhausted = "takes too much memory, or is nested too deeply, to compile"
            return CheckedGuide("", exhausted=exhausted)
        self.stop()
        raise Unavailable(f"a guide was not compiled within {ANSWER_SECONDS:g} s: the server is overloaded")

    def close(self) -> None:
        """End the process for good, from any thread; a check in progress, and every later one, raises Unavailable."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> int | None:
        """End the process, if it runs; the next check starts another. Returns how it ended, -N for signal N."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        try:
            # It ends by itself when its connection is closed, unless it compiles.
            return process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("the server is stopping")

    def _start(self) -> Connection:
        self._refuse_if_closed()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            folders = [str(Path(__file__).parents[2]), *_folder_of("llguidance")]
            # Isolated, and without site-packages: the two folders are all that it imports from.
            command = [sys.executable or "python3", "-I", "-S", "-c", _BOOT, str(theirs.fileno()), *folders]
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            except OSError as error:
                raise _unavailable(f"{command[0]}: {error}") from error
            connection = self._connection = Connection(ours.detach())
        if self._closed:
            # Meanwhile, and so not by `close`.
            self._process.kill()
        try:
            connection.send(self._vocabulary)
            if connection.poll(START_SECONDS):
                connection.recv_bytes()
                return connection
            reason = f"no answer within {START_SECONDS:g} s"
        except (EOFError, ConnectionError):
            reason = "it ended"
        self.stop()
        self._refuse_if_closed()
        raise _unavailable(reason)


def serve(descriptor: int) -> None:
    """Check the guides that arrive over a socket, until the other end is closed."""
    _limit_resources()
    from llama_engine.sampling.guide_matcher import GuideMatchers

    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        matchers = GuideMatchers(*connection.recv())
        connection.send_bytes(b"ready")
        while True:
            kind, text, seconds = connection.recv()
            # SIGPROF ends this process.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            began = time.process_time()
            grammar, problem = matchers.check(kind, text)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps((grammar, problem, time.process_time() - began)).encode())


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Of this thread, too: the kernel looks at the limit when a stack grows.
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    # Ctrl-C in a terminal reaches it, too; it ends with the process that started it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The model's own threads come first.
    os.nice(5)


def _folder_of(package: str) -> list[str]:
    spec = find_spec(package)
    return [str(Path(spec.origin).parents[1])] if spec is not None and spec.origin else []


def _unavailable(reason: str) -> GenerationError:
    _log.error("the process that checks guides can't be started: %s", reason)
    return GenerationError("guided decoding is unavailable; the server's log has the reason")
