"""The server's state, for probes and load balancers: a JSON file, and a port that answers 200 while it serves.

    {"state": "starting" | "serving" | "draining" | "failed", "reason": "one line", "since": seconds since 1970,
     "pid": tritonserver's}

The file is replaced atomically. Triton's own /v2/health/ready answers 200 until the model is unloaded, so it can't give
notice of a shutdown; the port can.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, get_args

from triton_supervisor.settings import RefusedError

Name = Literal["starting", "serving", "draining", "failed", "unreadable"]

ANSWERED = "everything that was accepted is answered"
"""The reason of "draining" once only tritonserver's own end is left."""


@dataclass(frozen=True)
class State:
    """A state, why (one line), since when (seconds since 1970), and the last tritonserver's pid, 0 before the first."""

    state: Name
    reason: str
    since: float
    pid: int = 0

    def __str__(self) -> str:
        return f"{self.state} for {max(time.time() - self.since, 0.0):.0f} s: {self.reason}"


def read_state(file: Path | None) -> State | None:
    """Return the supervisor's state of the server; None without a file: no supervisor has written a state (yet)."""
    if file is None:
        return None
    try:
        state = State(**json.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        return State("unreadable", f"{file}: {error}", time.time())
    return state if state.state in get_args(Name) else State("unreadable", f"{file}: {state.state}", time.time())


class StateFile:
    """The state in memory, in a file, and at a port, if there are these."""

    def __init__(self, path: Path | None, port: int | None, say: Callable[[str], None]) -> None:
        """Begin with "starting". say: takes a line if the file can't be written later.

        Raises RefusedError if the file can't be created or the port can't be bound.
        """
        self._path = path
        self._say = say
        self.current = State("starting", "the model is being loaded", time.time())
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._write(path)
        except OSError as error:
            raise RefusedError(f"TRITON_STATE_FILE is {path}, and can't be written: {error.strerror}") from error
        try:
            if port is not None:
                self._answer_at(port)
        except OSError as error:
            raise RefusedError(f"TRITON_READY_PORT is {port}, and can't be used: {error.strerror}") from error

    def enter(self, state: Name, reason: str, pid: int | None = None) -> None:
        """Change the state. pid: tritonserver's, if it has changed."""
        self.current = State(state, reason, time.time(), self.current.pid if pid is None else pid)
        try:
            if self._path is not None:
                self._write(self._path)
        except OSError as error:
            self._say(f"the state file {self._path} can't be written any more: {error.strerror}")

    def _write(self, path: Path) -> None:
        new = path.with_name(f".{path.name}-new")
        new.write_text(json.dumps(asdict(self.current)) + "\n", encoding="utf-8")
        new.replace(path)

    def _answer_at(self, port: int) -> None:
        """Answer any path on every address, in other threads: 200 while it serves, else 503, with the reason."""
        states = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0  # a silent client must not keep its thread

            def do_GET(self) -> None:
                self.wfile.write(self._head())

            def do_HEAD(self) -> None:
                self._head()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: load balancers ask every second."""

            def _head(self) -> bytes:
                body = f"{states.current.reason}\n".encode()
                self.send_response(200 if states.current.state == "serving" else 503)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                return body

        server = _ReadyServer(("", port), Handler)
        threading.Thread(target=server.serve_forever, name="ready-port", daemon=True).start()


class _ReadyServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Print the error, unless the client hung up: load balancers do once they have the status, every second."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # typeshed's private request type
