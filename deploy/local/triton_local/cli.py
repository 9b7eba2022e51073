"""The command line, `python -m triton_local`: options, signals and output; LocalTriton does the work.

The launcher's own lines go to stdout, the server's to stderr.
"""

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import click
from triton_supervisor.settings import (
    DEFAULT_RESTART_MINUTES,
    DEFAULT_RESTARTS,
    DEFAULT_STUCK_S,
    MAX_RESTART_MINUTES,
    MAX_RESTARTS,
)

from triton_local.errors import InterruptedStartError, LauncherError
from triton_local.log import TerminalView, gpu_driver_present
from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.ports import HeldPorts, Service, resolve_host
from triton_local.process import Supervised
from triton_local.ready_file import ReadyFile
from triton_local.server import LocalTriton

_PORT = click.IntRange(0, 65535)
_LOADING_LINE_S = 30.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.25


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--variant",
    help="`default` (config.pbtxt), or the NAME of configs/NAME.pbtxt.  [default: streaming, if it exists]",
)
@click.option("--model", help="Checkpoint: a folder or a hub id. Sets LLAMA_MODEL.  [default: the variant's own]")
@click.option("--http-port", type=_PORT, default=8000, help="0: any free port, which is printed.")
@click.option("--grpc-port", type=_PORT, default=8001, help="0: any free port, which is printed.")
@click.option("--metrics-port", type=_PORT, default=8002, help="0: any free port, which is printed.")
@click.option("--openai-port", type=_PORT, help="Starts the OpenAI endpoint; 0: any free port.  [default: off]")
@click.option("--host", default="127.0.0.1", help="IPv4 address to listen on; 0.0.0.0 is every one of this machine.")
@click.option("--model-repository", type=click.Path(path_type=Path), help="[default: the checkout's own]")
@click.option("--ready-file", type=click.Path(path_type=Path), help="JSON with its addresses, while it is ready.")
@click.option("--ready-timeout", type=float, default=3600.0, help="Seconds to download, load and be ready.")
@click.option("--log-file", type=click.Path(path_type=Path), help="The server's whole log, in a file as well.")
@click.option(
    "--stuck-after", type=float, default=DEFAULT_STUCK_S, help="Seconds without a step until the model counts as dead."
)
@click.option(
    "--restarts",
    type=click.IntRange(0, MAX_RESTARTS),
    default=DEFAULT_RESTARTS,
    help="Starts of a server that has died, within --restart-minutes; 0 ends it instead.",
)
@click.option(
    "--restart-minutes",
    type=click.IntRange(1, MAX_RESTART_MINUTES),
    default=DEFAULT_RESTART_MINUTES,
    help="Time that --restarts bounds.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the server's whole log.")
@click.argument("tritonserver_args", nargs=-1, type=click.UNPROCESSED)
def main(
    variant: str | None,
    model: str | None,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    openai_port: int | None,
    host: str,
    model_repository: Path | None,
    ready_file: Path | None,
    ready_timeout: float,
    log_file: Path | None,
    stuck_after: float,
    restarts: int,
    restart_minutes: int,
    verbose: bool,
    tritonserver_args: tuple[str, ...],
) -> None:
    """Run Triton on the model repository, without Docker; TRITONSERVER_ARGS come after --.

    SIGTERM or Ctrl-C drains accepted requests and ends, SIGQUIT kills. A server that dies is started again on the same
    ports. Exit codes: 0 drained, 70 the model died too often, 1 not ready in time or not drained in time, 2 refused
    before the start; else tritonserver's own.
    """
    supervised = Supervised(stuck_after=stuck_after, restarts=restarts, restart_minutes=restart_minutes)
    file = ReadyFile(ready_file)
    server = LocalTriton(
        variant=variant,
        model=model,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        host=host,
        model_repository=model_repository,
        extra_args=tritonserver_args,
        log_file=log_file,
        ready_timeout=ready_timeout,
        on_log_line=_Terminal(everything=verbose).show,
        supervised=supervised,
    )
    ports: dict[Service, int] = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    try:
        endpoint = None if openai_port is None else _endpoint(server, host, ports | {"openai": openai_port}, model)
        sys.exit(_serve(server, endpoint, host, file))
    except LauncherError as error:
        click.echo(f"triton_local: {error}", err=True)
        sys.exit(error.exit_code)


def _endpoint(server: LocalTriton, host: str, ports: dict[Service, int], model: str | None) -> OpenAIEndpoint:
    """Return the server's endpoint. Raises PortInUseError if one of all ports is taken, or two are the same."""
    with HeldPorts(resolve_host(host), ports):
        pass
    return OpenAIEndpoint(host, ports["openai"], server.exit_timeout, model)


def _serve(server: LocalTriton, endpoint: OpenAIEndpoint | None, host: str, file: ReadyFile) -> int:
    started = time.monotonic()
    stopper = _Stopper(server, endpoint)
    server.check()
    file.show(None)
    _say(f"starting tritonserver, variant {server.variant}")
    try:
        with _LoadingLines(started) as waiting, server, endpoint or contextlib.nullcontext():
            waiting.end()
            if endpoint is not None:
                endpoint.start(server.grpc_url, _say)
            stopper.server_is_ready()
            urls = server.urls if endpoint is None else {**server.urls, "openai": endpoint.address}

            def facts() -> dict[str, str | int]:
                addresses = {str(service): url for service, url in urls.items()}
                return {**addresses, "pid": server.pid, "variant": server.variant}

            file.show(facts())
            _say(f"ready after {time.monotonic() - started:.1f} s, pid {server.pid}, listening on {host}")
            for service, url in server.urls.items():
                _say(f"  {service:<7} {url}")
            if endpoint is not None:
                _say(f"  openai  {endpoint.url}")
                _say(f"try: {_example(endpoint)}")
            while server.exit_code is None:
                time.sleep(_POLL_S)
                # Absent while it drains, or has died and is started again.
                file.show(facts() if server.serves else None)
            return server.wait()
    finally:
        file.show(None)


def _example(endpoint: OpenAIEndpoint) -> str:
    """Return a command that asks the endpoint, as a shell takes it."""
    body = {"model": endpoint.served_name, "messages": [{"role": "user", "content": "What does textwrap.wrap do?"}]}
    return f"curl -s {endpoint.url}/chat/completions -d {shlex.quote(json.dumps(body))}"


class _LoadingLines:
    """Prints every 30 s that the server is still loading: a large checkpoint takes minutes."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_LoadingLines":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOADING_LINE_S):
            _say(f"still loading after {time.monotonic() - self._started:.0f} s")


class _Stopper:
    """Signal handling: before the server is ready a signal aborts the start, later it drains the server.

    The OpenAI endpoint drains first: its requests are the server's.
    """

    def __init__(self, server: LocalTriton, endpoint: OpenAIEndpoint | None) -> None:
        self._server = server
        self._endpoint = endpoint
        self._ready = False
        self._draining = False
        for signum in _STOP_SIGNALS:
            signal.signal(signum, self._handle)
        signal.signal(signal.SIGQUIT, self._kill)

    def server_is_ready(self) -> None:
        """From now on signals drain the endpoint, if there is one, and the server."""
        self._ready = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Repeated signals change nothing: make and a terminal send several."""
        if self._draining:
            return
        self._draining = True
        if not self._ready:
            raise InterruptedStartError(signum)
        # The endpoint's requests have as long as those that the server has after them.
        name, limit = signal.Signals(signum).name, self._server.exit_timeout * (1 if self._endpoint is None else 2)
        _say(f"{name}: ending when the running requests are answered, in {limit:g} s at most; SIGQUIT: at once")
        if self._endpoint is None:
            self._terminate()
        else:
            self._endpoint.end_then(self._terminate)

    def _terminate(self) -> None:
        # The server may have ended while the endpoint did.
        with contextlib.suppress(RuntimeError):
            self._server.terminate()

    def _kill(self, signum: int, frame: FrameType | None) -> None:
        if self._endpoint is not None:
            self._endpoint.kill()
        with contextlib.suppress(RuntimeError):
            self._server.kill()


class _Terminal:
    """Shows the server's lines on stderr, in the thread that reads them."""

    def __init__(self, everything: bool) -> None:
        self._everything = everything
        self._view = TerminalView(has_gpu=gpu_driver_present())
        self._gone = threading.Event()

    def show(self, line: str) -> None:
        if (self._view.shows(line) or self._everything) and not self._gone.is_set():
            try:
                click.echo(line, err=True)
            except OSError:
                self._gone.set()  # the reader is gone; the server's output is still read


def _say(message: str) -> None:
    # Unbuffered: a signal handler may print in the middle of a line. The reader may be gone, and serving goes on.
    with contextlib.suppress(OSError):
        os.write(1, f"triton_local: {message}\n".encode())
