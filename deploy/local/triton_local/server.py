"""`LocalTriton`: a tritonserver on this machine for as long as a `with` block lasts.

    with LocalTriton(variant="default") as server:
        print(server.http_address)  # 127.0.0.1:34567, and the model is ready

The command line (__main__.py) is a thin layer over it.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from triton_supervisor import process
from triton_supervisor.settings import CONFIG_IF_UNSET, STOP_MARGIN_S, RefusedError, Settings
from triton_supervisor.triton import MODEL, Address, RepositoryApi
from triton_supervisor.tritonserver_options import Options, refuse_reserved, served_models

from triton_local.default_model import fetch_default_model
from triton_local.errors import InvalidSettingError, StartFailedError
from triton_local.ports import SERVICES, choose_ports, reachable_host, resolve_host
from triton_local.runtime import Interpreter, find_wheel, link_runtime, refuse_numpy_2, runtime_environment
from triton_local.triton_log import MAX_LINES, failure_reason

# Options for tritonserver that the launcher sets, and what to use instead; the supervisor refuses others.
_RESERVED = {
    **{f"--{service}-port": f"--{service}-port before --" for service in SERVICES},
    **{f"--{service}-address": "--host" for service in SERVICES},
    "--model-repository": "--model-repository before --",
    "--model-store": "--model-repository before --",
    "--backend-directory": "nothing: the launcher assembles it",
    "--allow-grpc": "nothing: the launcher serves it",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_POLL_S = 0.1
_SLACK_S = 20.0
"""Time for the supervisor itself, on a slow machine."""


class LocalTriton:
    """A tritonserver that is ready on entering the context and gone on leaving it, under `triton_supervisor`.

    Ports of 0 are any free ones. variant: a config's name; None: `streaming`, where the repository has it. model: a
    folder, GGUF file or hub id for LLAMA_MODEL; None: the environment's, else the default checkpoint. environment:
    overrides the current one, which has the supervisor's settings too (TRITON_GRACE_SECONDS, TRITON_STUCK_SECONDS).
    extra_args: for tritonserver. on_log_line: takes each line of the log, in another thread. Methods raise errors of
    the LauncherError tree.
    """

    def __init__(
        self,
        *,
        variant: str | None = None,
        model: str | None = None,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        host: str = "127.0.0.1",
        model_repository: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        ready_timeout: float = 180.0,
        on_log_line: Callable[[str], None] | None = None,
    ) -> None:
        """Check everything, and start nothing."""
        if not (math.isfinite(ready_timeout) and ready_timeout > 0):
            raise InvalidSettingError(f"ready timeout {ready_timeout} is out of bounds: more than 0 seconds")
        self._ready_timeout = ready_timeout
        self._repository = find_repository(None if model_repository is None else Path(model_repository))
        streams = (self._repository / MODEL / "configs" / f"{CONFIG_IF_UNSET}.pbtxt").is_file()
        self.variant = variant or (CONFIG_IF_UNSET if streams else "default")
        """The served config's name."""
        self._environment = {**os.environ, **(environment or {}), "TRITON_MODEL_CONFIG": self.variant}
        if model is not None:
            self._environment["LLAMA_MODEL"] = resolve_model(model)
        self._extra = tuple(extra_args)
        try:
            refuse_reserved(self._extra, _RESERVED)
            self._models = served_models(self._repository, self.variant)
            self._settings = Settings.of(self._environment)
            has_metrics = Options.parse(self._extra).metrics is not None
        except RefusedError as error:
            raise InvalidSettingError(str(error)) from error
        self._address = resolve_host(host)
        self._ports = choose_ports(self._address, {"http": http_port, "grpc": grpc_port, "metrics": metrics_port})
        reachable = reachable_host(self._address)
        # HOST:PORT of each service, as a client on this machine reaches it once it is started.
        self.http_address, self.grpc_address, self.metrics_address = (
            f"{reachable}:{self._ports[service]}" for service in SERVICES
        )
        self.addresses = {"http": self.http_address, "grpc": self.grpc_address}
        """Those of the services that run: `extra_args` may turn the metrics off."""
        if has_metrics:
            self.addresses["metrics"] = self.metrics_address
        self._interpreter = Interpreter.current()
        self._wheel = find_wheel(self._interpreter.site_packages)
        refuse_numpy_2(self._interpreter, self._wheel)
        self._on_log_line = on_log_line
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._resources = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._pump = threading.Thread(target=self._pump_output, name="tritonserver-log", daemon=True)
        self.pid = 0
        """tritonserver's process id, once it is started."""

    def __enter__(self) -> LocalTriton:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """0 drained, 1 not drained in time, 70 the model or tritonserver died; None while it runs.

        Before it was ready: tritonserver's own.
        """
        return process.exit_code(self._running())

    @property
    def grace(self) -> int:
        """Seconds that accepted requests have at shutdown."""
        return self._settings.grace

    def log_text(self) -> str:
        """Return the log so far (its last 20,000 lines)."""
        return "\n".join([*self._lines])

    def start(self) -> None:
        """Start, and wait until server and model are ready. After a LauncherError nothing is left running."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def terminate(self) -> None:
        """Start a graceful shutdown. Returns at once."""
        self._running().send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server and its children. Returns at once."""
        self._running().send_signal(signal.SIGQUIT)

    def wait(self) -> int:
        """Wait until the server has ended, then for the last line of its log; return its exit code."""
        self._running().wait()
        self._pump.join(_SLACK_S)
        code = self.exit_code
        assert code is not None
        return code

    def stop(self) -> None:
        """End the server gracefully, and kill it after a bounded time. Harmless without a server."""
        if self._process is not None:
            self.terminate()
            try:
                self._process.wait(self._settings.grace + STOP_MARGIN_S + _SLACK_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # and the kernel kills the server with it
            self.wait()
        self._resources.close()

    def _start(self) -> None:
        choose_ports(self._address, self._ports, self._resources)  # `stop` frees what it binds.
        fetch_default_model(self._repository, self._environment)
        folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="triton-local-")))
        link_runtime(folder, self._wheel, self._interpreter)
        environment = runtime_environment(folder, self._wheel, self._interpreter, self._environment)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "triton_supervisor", *self._options(folder), *self._extra],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal is the launcher's, which ends the OpenAI endpoint first.
            start_new_session=True,
        )
        self._pump.start()
        deadline = time.monotonic() + self._ready_timeout
        while self.exit_code is None:
            self._find_tritonserver()
            if self._is_ready():
                return
            if time.monotonic() > deadline:
                raise StartFailedError(
                    f"not ready within {self._ready_timeout:g} s (--ready-timeout); the log ends with: "
                    f"{failure_reason([*self._lines])}"
                )
            time.sleep(_POLL_S)
        code = self.wait()
        reason = failure_reason([*self._lines])
        raise StartFailedError(f"tritonserver ended with code {code} before it was ready: {reason}")

    def _options(self, folder: Path) -> list[str]:
        """Return the options that the launcher sets: repository, backends, caches, addresses and ports.

        The supervisor adds its own, and the caller appends `extra_args`. folder: filled by `link_runtime`.
        """
        options = [
            f"--model-repository={self._repository}",
            f"--backend-directory={folder / 'backends'}",
            f"--cache-directory={self._wheel.caches}",
        ]
        for service in SERVICES:
            options += [f"--{service}-address={self._address}", f"--{service}-port={self._ports[service]}"]
        return options

    def _pump_output(self) -> None:
        process = self._running()
        assert process.stdout is not None
        with process.stdout as stdout:
            for line in stdout:
                text = line.decode(errors="replace").rstrip("\r\n")
                self._lines.append(text)
                if self._on_log_line is not None:
                    self._on_log_line(text)

    def _find_tritonserver(self) -> None:
        """Set `pid`: the supervisor's child is tritonserver, or for a moment its --help."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._running().pid).children():
                self.pid = int(child.pid)

    def _is_ready(self) -> bool:
        api = RepositoryApi(Address.parse(self.http_address), {})
        listens = all(map(_listens, self.addresses.values()))
        return listens and all(api.is_ready(model) for model in self._models)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server hasn't been started: use LocalTriton as a context manager")
        return self._process


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex((host, int(port))) == 0


def find_repository(path: Path | None) -> Path:
    """Return the absolute model repository at `path`, else the checkout's. Raises InvalidSettingError."""
    # The package runs from the checkout (an editable install), three folders below its root.
    chosen = Path(__file__).resolve().parents[3] / "model_repository" if path is None else path.expanduser().absolute()
    config = chosen / MODEL / "config.pbtxt"
    if not config.is_file():
        raise InvalidSettingError(
            f"{chosen} is no model repository with the model {MODEL}: {config} is missing; "
            f"name the right folder with --model-repository"
        )
    return chosen


def resolve_model(value: str) -> str:
    """Return the value of LLAMA_MODEL: the absolute path of an existing folder or GGUF file, or a hub id unchanged.

    Raises InvalidSettingError for a path that doesn't exist, and for anything else.
    """
    path = Path(value).expanduser()
    if value and (path.is_dir() or (path.suffix == ".gguf" and path.is_file())):
        return str(path.absolute())
    # "models/typo" has the form of a hub id; that the folder "models" exists makes it a path.
    means_path = value.endswith("/") or ("/" in value and path.parent.is_dir())
    if means_path or not _HUB_ID.fullmatch(value):
        raise InvalidSettingError(
            f"model {value!r} is neither an existing folder or GGUF file nor a hub id (organisation/name)"
        )
    return value
