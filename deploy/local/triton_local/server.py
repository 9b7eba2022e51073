"""`LocalTriton`: a tritonserver on this machine for as long as a `with` block lasts.

    with LocalTriton(variant="default") as server:
        print(server.http_url)  # 127.0.0.1:34567, and the model is ready

The command line (cli.py) is a thin layer over it.
"""

import math
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from triton_supervisor.plan import Plan
from triton_supervisor.repository_api import served_models
from triton_supervisor.shared_memory import prefix_for
from triton_supervisor.triton_http import Address

from triton_local.command import (
    check_extra_arguments,
    exit_timeout,
    served,
    server_arguments,
    server_environment,
)
from triton_local.errors import InvalidSettingError, NotReadyError, StartFailedError
from triton_local.installation import Interpreter, find_wheel
from triton_local.log import ServerLog, failure_reason
from triton_local.ports import HeldPorts, Service, reachable_host, resolve_host
from triton_local.process import Supervised, SupervisorProcess
from triton_local.repository import ModelRepository, resolve_model
from triton_local.runtime import Runtime, cache_root, prepare_runtime

_POLL_S = 0.1


@dataclass(frozen=True)
class _Parts:
    """The checked parts of a start."""

    runtime: Runtime
    repository: ModelRepository
    models: tuple[str, ...]
    address: str
    environment: Mapping[str, str]


class LocalTriton:
    """A tritonserver that is ready on entering the context and gone on leaving it.

    Ports of 0 are any free ones. variant: a config's name; None: `streaming`, where the repository has it. model: a
    folder or a hub id for LLAMA_MODEL. environment: overrides the current one. extra_args: for tritonserver. The log is
    in `log_text()`, in `log_file` if given, and goes line by line to `on_log_line`, in another thread. supervised:
    starts a dead server again, on the same ports, within bounds, and drains at shutdown. Methods raise errors of the
    LauncherError tree.
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
        log_file: Path | str | None = None,
        ready_timeout: float = 180.0,
        on_log_line: Callable[[str], None] | None = None,
        supervised: Supervised | None = None,
    ) -> None:
        """Start nothing. supervised: None is `Supervised()`, as in `make serve`."""
        self._variant = variant
        self._model = model
        self._requested: dict[Service, int] = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
        self._host = host
        self._repository_path = None if model_repository is None else Path(model_repository)
        self._environment = dict(environment or {})
        self._extra = tuple(extra_args)
        self._log_file = None if log_file is None else Path(log_file)
        self._ready_timeout = ready_timeout
        self._on_log_line = on_log_line
        self._supervised = supervised or Supervised()
        self._resources = ExitStack()
        self._log: ServerLog | None = None
        self._process: SupervisorProcess | None = None
        self._host_for_clients = ""
        self._ports: dict[Service, int] = {}

    def __enter__(self) -> "LocalTriton":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def variant(self) -> str:
        """The served config's name. Raises UnknownRepositoryError."""
        return ModelRepository.at(self._repository_path).served_variant() if self._variant is None else self._variant

    @property
    def http_url(self) -> str:
        """host:port of the HTTP service, as a client on this machine reaches it."""
        return self._url("http")

    @property
    def grpc_url(self) -> str:
        """host:port of the gRPC service, as a client on this machine reaches it."""
        return self._url("grpc")

    @property
    def metrics_url(self) -> str:
        """host:port of the metrics service, as a client on this machine reaches it."""
        return self._url("metrics")

    @property
    def urls(self) -> dict[Service, str]:
        """host:port of each service that is on; `extra_args` may have turned gRPC or metrics off."""
        return {service: self._url(service) for service in served(self._extra)}

    @property
    def pid(self) -> int:
        """tritonserver's process id; a restart changes it."""
        condition = self._running().condition()
        return 0 if condition is None else condition.pid

    @property
    def serves(self) -> bool:
        """Whether it is ready; not while it drains, or is started again."""
        condition = self._running().condition()
        return condition is not None and condition.state == "serving"

    @property
    def exit_code(self) -> int | None:
        """0 drained, 70 the model died too often, else tritonserver's own; None while it runs."""
        return self._running().exit_code()

    @property
    def exit_timeout(self) -> int:
        """Seconds that accepted requests have at shutdown. Raises InvalidSettingError."""
        return exit_timeout(self._extra)

    def log_text(self) -> str:
        """Return the log so far (its last 20,000 lines)."""
        return "" if self._log is None else "\n".join(self._log.lines())

    def check(self) -> None:
        """Raise a LauncherError if the server can't be started; starts nothing, writes only to the cache."""
        self._parts()

    def start(self) -> None:
        """Start, and wait until server and model are ready. After a LauncherError nothing is left running."""
        parts = self._parts()
        try:
            self._start(parts)
        except BaseException:
            self.stop()
            raise

    def terminate(self) -> None:
        """Start a graceful shutdown. Returns at once."""
        self._running().terminate()

    def kill(self) -> None:
        """Kill the server and its children. Returns at once."""
        self._running().kill()

    def wait(self) -> int:
        """Wait until the server has ended; return its exit code."""
        return self._running().wait()

    def stop(self) -> None:
        """End the server gracefully, and kill it after a bounded time. Harmless without a server."""
        if self._process is not None:
            self._process.stop()
        self._resources.close()

    def _parts(self) -> _Parts:
        if not (math.isfinite(self._ready_timeout) and self._ready_timeout > 0):
            raise InvalidSettingError(f"ready timeout {self._ready_timeout} is out of bounds: more than 0 seconds")
        self._supervised.check()
        repository = ModelRepository.at(self._repository_path)
        repository.check_variant(self.variant)
        model = None if self._model is None else resolve_model(self._model)
        check_extra_arguments(self._extra)
        address = resolve_host(self._host)
        with HeldPorts(address, self._requested):  # a taken port is reported first
            pass
        interpreter = Interpreter.current()
        runtime = prepare_runtime(find_wheel(interpreter.site_packages), interpreter, cache_root(os.environ))
        environment = server_environment(
            runtime,
            os.environ,
            model,
            self._environment,
            grace=self.exit_timeout,
            stuck=self._supervised.stuck_seconds,
        )
        return _Parts(runtime, repository, served_models(repository.path, self.variant), address, environment)

    def _start(self, parts: _Parts) -> None:
        self._log = self._resources.enter_context(ServerLog(self._log_file, self._on_log_line))
        folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="triton-local-")))
        with HeldPorts(parts.address, self._requested) as held:
            self._host_for_clients = reachable_host(parts.address)
            self._ports = held.numbers
            state_file = (self._supervised.state_file or folder / "state.json").absolute()
            self._process = SupervisorProcess(self._plan(parts, state_file), state_file, self._log.add)
            if self._wait_until_ready():
                return
        code, reason = self._process.wait(), failure_reason(self._log.lines())
        raise StartFailedError(f"tritonserver ended with code {code} before it was ready: {reason}")

    def _plan(self, parts: _Parts, state_file: Path) -> Plan:
        supervised, ports = self._supervised, self._ports
        # Unique, so that a killed server's shared memory is recognised.
        shm_prefix = prefix_for(uuid.uuid4().hex[:12])
        arguments = server_arguments(
            parts.runtime, parts.repository.path, self.variant, parts.address, ports, shm_prefix, self._extra
        )
        has_metrics = "metrics" in served(self._extra)
        return Plan(
            arguments=arguments,
            environment=parts.environment,
            models=parts.models,
            http=Address(self._host_for_clients, ports["http"]),
            metrics=Address(self._host_for_clients, ports["metrics"]) if has_metrics else None,
            shm_prefix=shm_prefix,
            grace=self.exit_timeout,
            notice=supervised.notice,
            stuck=supervised.stuck_seconds,
            restarts=supervised.restarts,
            restart_minutes=supervised.restart_minutes,
            state_file=state_file,
            parent=os.getpid(),
        )

    def _wait_until_ready(self) -> bool:
        """Return False if the server has ended instead. Raises NotReadyError after the timeout."""
        process = self._running()
        deadline = time.monotonic() + self._ready_timeout
        while process.exit_code() is None:
            if self.serves and all(self._listens(service) for service in served(self._extra)):
                return True
            if time.monotonic() > deadline:
                lines = [] if self._log is None else self._log.lines()
                raise NotReadyError(
                    f"not ready within {self._ready_timeout:g} s (--ready-timeout); the log ends with: "
                    f"{failure_reason(lines)}"
                )
            time.sleep(_POLL_S)
        return False

    def _listens(self, service: Service) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            return probe.connect_ex((self._host_for_clients, self._ports[service])) == 0

    def _running(self) -> SupervisorProcess:
        if self._process is None:
            raise RuntimeError("the server hasn't been started: use LocalTriton as a context manager")
        return self._process

    def _url(self, service: Service) -> str:
        self._running()
        return f"{self._host_for_clients}:{self._ports[service]}"
