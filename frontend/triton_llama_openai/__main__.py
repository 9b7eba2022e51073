"""The command `triton-llama-openai`: serves until SIGTERM or Ctrl-C, then answers what it has accepted and ends."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import sys
from functools import partial

try:
    import uvicorn
    from starlette.types import ASGIApp

    from triton_llama_openai.app import create_app
    from triton_llama_openai.middleware import MAX_HEADER_BYTES
    from triton_llama_openai.served.models import Models
    from triton_llama_openai.settings import InvalidSettingsError, Settings
except ModuleNotFoundError as error:
    # The package has this command without the extra, too.
    sys.exit(f"triton-llama-openai: {error.name} is missing; install it with pip install 'triton-llama[openai]'")

LOG = logging.getLogger("triton_llama_openai")
REFUSED = 2
"""Exit code for settings that can't be used."""

# Longer than clients and proxies keep idle connections: one that closes first may lose a request.
_KEEP_ALIVE_S = 75


def main() -> int:
    """Run the endpoint; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        settings = Settings.parse(sys.argv[1:], os.environ)
        models = Models.of_settings(settings)
        listener = _listen(settings.host, settings.port)
        app = create_app(settings, models, partial(_announce, models, listener))
    except InvalidSettingsError as error:
        print(f"triton-llama-openai: {error}", file=sys.stderr)
        return REFUSED
    _allow_connections(settings.max_connections)
    server = create_server(app, settings)
    # For a signal before uvicorn handles signals, and for the one that ended it, which it raises once more: a drained
    # end is no failure.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listener])
    return 0


def _announce(models: Models, listener: socket.socket) -> None:
    # Loaded objects stay: garbage collections that walk them would pause every stream.
    gc.collect()
    gc.freeze()
    host, port = listener.getsockname()[:2]
    names = ", ".join(models.labels)
    print(f"triton-llama-openai: serving {names}, listening on http://{host}:{port}/v1", flush=True)


def create_server(app: ASGIApp, settings: Settings) -> uvicorn.Server:
    """Return the server of an application, with the settings' bounds on connections."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            # uvloop, where it is installed: half of asyncio's TTFT under load.
            loop="auto",
            # Unlike httptools it bounds the bytes of headers.
            http="h11",
            h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
            # uvicorn refuses from this number of connections on.
            limit_concurrency=settings.max_connections + 1,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=settings.grace,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
    )


def _allow_connections(connections: int) -> None:
    """Raise the limit of open files to what the connections need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + 256
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        LOG.warning("max_connections is %s, but the system allows %s open files", connections, allowed)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises InvalidSettingsError if the address can't be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise InvalidSettingsError(f"can't listen on {host}:{port}: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
