"""A port of its own that tells load balancers whether to send more: 200 while the server is serving, else 503.

Triton's own /v2/health/ready answers 200 until the model is unloaded, so it can't give notice. Any path is the same
question; the body is the reason, in one line.
"""

from __future__ import annotations

import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from triton_supervisor.settings import RefusedError
from triton_supervisor.state_file import StateFile

_ANSWER_S = 5.0


class ReadyPort:
    """A port on every address, bound when this is made."""

    def __init__(self, port: int, state: StateFile) -> None:
        """Raises RefusedError when the port can't be used. port: 0 is any free one."""

        class Handler(BaseHTTPRequestHandler):
            timeout = _ANSWER_S  # a client that says nothing must not keep its thread

            def do_GET(self) -> None:
                self.wfile.write(self._head())

            def do_HEAD(self) -> None:
                self._head()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: load balancers ask every second."""

            def _head(self) -> bytes:
                """Send the answer's head, and return its body."""
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
        """Answer from now on, from threads of its own."""
        self._thread.start()

    def close(self) -> None:
        """Answer nothing more. Only after `begin`."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Print what went wrong; but load balancers hang up as soon as they have seen the status, every second."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _readiness(state: StateFile) -> tuple[bool, str]:
    condition = state.condition
    if condition.state == "serving" and state.announced():
        return False, "the end is announced; still serving"
    return condition.state == "serving", condition.reason
