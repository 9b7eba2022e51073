"""The client's command line as a process, and on a terminal of its own, with a user who types and reads there."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from server.servers import PATIENCE_S
from triton_local.server import LocalTriton

CODE = "from triton_llama.cli import main; main()"
COMMAND = (sys.executable, "-W", "error", "-c")

CTRL_C = "\x03"
CTRL_D = "\x04"

# A session's leader gets the first terminal it opens as its own, and Ctrl-C typed there is its SIGINT.
_ON_A_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
tty = os.open(sys.argv.pop(1), os.O_RDWR)
for stream in range(3):
    os.dup2(tty, stream)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def url(server: LocalTriton, protocol: str) -> str:
    return f"{protocol}://{server.http_url if protocol == 'http' else server.grpc_url}"


def run(server: LocalTriton, protocol: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of `triton-llama` against this server to its end."""
    command = [*COMMAND, CODE, *arguments, "--url", url(server, protocol)]
    return subprocess.run(command, input=stdin, capture_output=True, encoding="utf-8", timeout=120, check=False)


class Terminal:
    """The other end of the program's terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self._process = process
        self._master = master
        self._unread = ""

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._master, text.encode())

    def read_until(self, text: str) -> str:
        """Return what the screen shows next, up to and with this text; it must come."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._unread:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} never came, only {self._unread!r}"
            self._unread += os.read(self._master, 65536).decode(errors="replace")
        before, _, self._unread = self._unread.partition(text)
        return before + text

    def read_more(self) -> None:
        """Wait until the screen shows anything that hasn't been read."""
        while not self._unread:
            self._unread = os.read(self._master, 65536).decode(errors="replace")

    def exit_code(self) -> int:
        """Wait for the end of the program."""
        return self._process.wait(PATIENCE_S)


@contextmanager
def on_a_terminal(arguments: Sequence[str]) -> Iterator[Terminal]:
    """Run a command of `triton-llama` on a terminal; killed at the end if it still runs."""
    master, slave = pty.openpty()
    try:
        command = [sys.executable, "-c", _ON_A_TERMINAL, os.ttyname(slave), *COMMAND[1:], CODE, *arguments]
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                yield Terminal(process, master)
            finally:
                process.kill()
    finally:
        os.close(slave)
        os.close(master)
