"""A port for load balancers: 200 to any path while the server is serving, else 503, with the reason as the body.

Triton's own /v2/health/ready answers 200 until the model is unloaded, so it can't give notice.
"""

from __future__ import annotations

import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from triton_supervisor.settings import RefusedError
from triton_supervisor.state import StateFile

_ANSWER_S = 5.0


class ReadyPort:
    """A port on every address, bound on creation."""

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
