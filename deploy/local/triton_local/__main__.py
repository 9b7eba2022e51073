"""The command line, `python -m triton_local`: options, signals and output; LocalTriton does the work.

The launcher's own lines go to stdout, the server's to stderr.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import click
from triton_supervisor.settings import RefusedError, whole_number

from triton_local.errors import EndpointEndedError, InterruptedStartError, InvalidSettingError, LauncherError
from triton_local.openai_endpoint import OpenAIEndpoint, example_command
from triton_local.ports import choose_ports, resolve_host
from triton_local.server import LocalTriton

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.25


def port(value: object) -> int:
    """Parse a port. Raises click.BadParameter, with the bounds also for a word, unlike click's IntRange."""
    try:
        return whole_number("port", str(value), 0, 65535)
    except RefusedError:
        raise click.BadParameter(f"{value!r} is no port; it must be 0 ... 65535") from None


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--variant",
    help="`default` (config.pbtxt), or the NAME of configs/NAME.pbtxt.  [default: streaming, if it exists]",
)
@click.option("--model", help="Folder, GGUF file or hub id. Sets LLAMA_MODEL.  [default: SmolLM2-135M-Instruct]")
@click.option("--http-port", type=port, default=8000, help="0: any free port, which is printed.")
@click.option("--grpc-port", type=port, default=8001, help="0: any free port, which is printed.")
@click.option("--metrics-port", type=port, default=8002, help="0: any free port, which is printed.")
@click.option("--openai-port", type=port, help="Starts the OpenAI endpoint; 0: any free port.  [default: off]")
@click.option("--host", default="127.0.0.1", help="IPv4 address to listen on; 0.0.0.0 is every one of this machine.")
@click.option("--model-repository", type=click.Path(path_type=Path), help="[default: the checkout's own]")
@click.option("--ready-file", type=click.Path(path_type=Path), help="JSON with its addresses, while it is ready.")
@click.option("--ready-timeout", type=float, default=3600.0, help="Seconds to download, load and be ready.")
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
    tritonserver_args: tuple[str, ...],
) -> None:
    """Run Triton on the model repository, without Docker; TRITONSERVER_ARGS come after --.

    SIGTERM or Ctrl-C drains accepted requests and ends, SIGQUIT kills. The environment has the supervisor's settings,
    as in the container: TRITON_GRACE_SECONDS, TRITON_STUCK_SECONDS. Exit codes: 0 drained, 70 the model, tritonserver
    or the endpoint died, 1 not ready in time or not drained in time, 2 refused before the start; else tritonserver's
    own.
    """
    requested = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    if openai_port is not None:
        requested["openai"] = openai_port
    try:
        # In one call, so that free ports differ.
        ports = choose_ports(resolve_host(host), requested)
        server = LocalTriton(
            variant=variant,
            model=model,
            http_port=ports["http"],
            grpc_port=ports["grpc"],
            metrics_port=ports["metrics"],
            host=host,
            model_repository=model_repository,
            extra_args=tritonserver_args,
            ready_timeout=ready_timeout,
            on_log_line=_show,
        )
        endpoint = OpenAIEndpoint(host, ports["openai"], server.grace) if "openai" in ports else None
        sys.exit(_serve(server, endpoint, host, ready_file))
    except LauncherError as error:
        click.echo(f"triton_local: {error}", err=True)
        sys.exit(error.exit_code)


def _serve(server: LocalTriton, endpoint: OpenAIEndpoint | None, host: str, ready_file: Path | None) -> int:
    started = time.monotonic()
    stopper = _Stopper(server, endpoint)
    _write_ready_file(ready_file, None)
    _say(f"starting tritonserver, config {server.variant}")
    try:
        with server, endpoint or contextlib.nullcontext():
            if endpoint is not None:
                endpoint.start(server.grpc_address, server.metrics_address)
            stopper.ready = True
            addresses = server.addresses | ({} if endpoint is None else {"openai": endpoint.address})
            _say(f"ready after {time.monotonic() - started:.1f} s, pid {server.pid}, listening on {host}")
            for service, address in server.addresses.items():
                _say(f"  {service:<7} {address}")
            if endpoint is not None:
                _say(f"  openai  {endpoint.url}")
                _say(f"try: {example_command(endpoint.address, endpoint.served_name)}")
            _write_ready_file(ready_file, {**addresses, "pid": server.pid, "variant": server.variant})
            while server.exit_code is None and not stopper.told_to_end:
                if endpoint is not None and endpoint.exit_code is not None:
                    raise EndpointEndedError(f"the OpenAI endpoint has ended with code {endpoint.exit_code}")
                time.sleep(_POLL_S)
            _write_ready_file(ready_file, None)
            if endpoint is not None:
                # First, because its requests are the server's: a dead one answers none.
                endpoint.stop() if stopper.told_to_end else endpoint.kill()
            server.terminate()
            code = server.wait()
            if code == 0:
                _say("ended: Triton has answered every request that it accepted")
            return code
    finally:
        _write_ready_file(ready_file, None)


def _write_ready_file(path: Path | None, facts: Mapping[str, object] | None) -> None:
    """Replace the file, or remove it without facts. Raises InvalidSettingError where it can't be written."""
    if path is None:
        return
    try:
        if facts is None:
            path.unlink(missing_ok=True)
        else:
            new = path.with_name(f".{path.name}-new")
            new.write_text(json.dumps(facts) + "\n")
            new.replace(path)
    except OSError as error:
        raise InvalidSettingError(f"ready file {path} can't be written: {error.strerror}") from error


class _Stopper:
    """Signal handling: before the server is `ready` a signal aborts the start, later it requests the drain.

    told_to_end: whether the drain is requested.
    """

    def __init__(self, server: LocalTriton, endpoint: OpenAIEndpoint | None) -> None:
        self._server = server
        self._endpoint = endpoint
        self.ready = False
        self.told_to_end = False
        for signum in _STOP_SIGNALS:
            signal.signal(signum, self._handle)
        signal.signal(signal.SIGQUIT, self._kill)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Repeated signals change nothing: make and a terminal send several."""
        if self.told_to_end:
            return
        self.told_to_end = True
        if not self.ready:
            raise InterruptedStartError(signum)
        # The endpoint's requests have as long as those that the server has after them.
        name, limit = signal.Signals(signum).name, self._server.grace * (1 if self._endpoint is None else 2)
        _say(f"{name}: ending when the running requests are answered, in {limit:g} s at most; SIGQUIT: at once")

    def _kill(self, signum: int, frame: FrameType | None) -> None:
        if self._endpoint is not None:
            self._endpoint.kill()
        # The server may not be started yet.
        with contextlib.suppress(RuntimeError):
            self._server.kill()


def _show(line: str) -> None:
    """Show a line of the server's log, in the thread that reads them; its reader may be gone, and serving goes on."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def _say(message: str) -> None:
    # Unbuffered: a signal handler may print in the middle of a line. The reader may be gone, and serving goes on.
    with contextlib.suppress(OSError):
        os.write(1, f"triton_local: {message}\n".encode())


if __name__ == "__main__":
    main(prog_name="triton_local")
