"""The server's state, for observers that can't ask tritonserver: a JSON file for probes, a port for load balancers.

    {"state": "starting" | "serving" | "draining" | "failed", "reason": "one line", "since": seconds since 1970}

The file is replaced atomically. A file `<state file>.announced` beside it announces the shutdown: the preStop hook
creates it, and from then on the server isn't ready, though it goes on serving.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

from triton_supervisor.settings import RefusedError

State = Literal["starting", "serving", "draining", "failed"]

_ANSWER_S = 5.0


@dataclass(frozen=True)
class Condition:
    """A state, why, and since when (seconds since 1970)."""

    state: State
    reason: str
    since: float


def announcement_file(state_file: Path) -> Path:
    """Return the file whose existence announces the shutdown."""
    return state_file.with_name(f"{state_file.name}.announced")


class StateFile:
    """The state in memory, and in a file if there is one."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        """Begin with "starting". path: None keeps it in memory only. say: takes a line if the file can't be written.

        Removes an earlier run's announcement. Raises RefusedError if the file can't be created.
        """
        self._path = path
        self._say = say
        self._behind = False
        self.condition = Condition("starting", "the model is being loaded", time.time())
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            announcement_file(path).unlink(missing_ok=True)
            self._write(path)
        except OSError as error:
            raise RefusedError(
                f"the state file {path} (TRITON_STATE_FILE) can't be written: {error.strerror}"
            ) from error

    def enter(self, state: State, reason: str) -> None:
        """Change the state. A file that can't be written now doesn't stop the server: see `catch_up`."""
        if (state, reason) == (self.condition.state, self.condition.reason):
            return
        self.condition = Condition(state, reason, time.time())
        self._try_to_write()

    def catch_up(self) -> None:
        """Retry a failed write; call it often."""
        if self._behind:
            self._try_to_write()

    def announced(self) -> bool:
        """Return whether the shutdown is announced."""
        return self._path is not None and announcement_file(self._path).exists()

    def _try_to_write(self) -> None:
        """Write; report the first of consecutive failures."""
        if self._path is None:
            return
        try:
            self._write(self._path)
        except OSError as error:
            if not self._behind:
                self._say(f"the state file {self._path} can't be written any more: {error.strerror}")
            self._behind = True
        else:
            self._behind = False

    def _write(self, path: Path) -> None:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.condition)) + "\n")
            # mkstemp's mode is 0600; a probe may run as another user.
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink(missing_ok=True)
            raise


class ReadyPort:
    """A port on every address that answers any path: 200 while the server is serving, else 503, with the reason.

    Triton's own /v2/health/ready answers 200 until the model is unloaded, so it can't give notice. Bound on creation.
    """

    def __init__(self, port: int, state: StateFile) -> None:
        """port: 0 is any free one. Raises RefusedError if it can't be bound."""

        class Handler(BaseHTTPRequestHandler):
            timeout = _ANSWER_S  # a silent client must not keep its thread

            def do_GET(self) -> None:
                self.wfile.write(self._head())

            def do_HEAD(self) -> None:
                self._head()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: load balancers ask every second."""

            def _head(self) -> bytes:
                """Send the head of the response; return its body."""
                serving, reason = _readiness(state)
                body = f"{reason}\n".encode()
                self.send_response(200 if serving else 503)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                return body

        try:
            self._server = _Server(("", port), Handler)
        except OSError as error:
            raise RefusedError(f"TRITON_READY_PORT is {port}, and can't be used: {error.strerror}") from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="ready-port", daemon=True)

    def begin(self) -> None:
        """Answer from now on, in other threads."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Only after `begin`."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Print the error, unless the client hung up: load balancers do once they have the status, every second."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _readiness(state: StateFile) -> tuple[bool, str]:
    condition = state.condition
    if condition.state == "serving" and state.announced():
        return False, "the end is announced; still serving"
    return condition.state == "serving", condition.reason
