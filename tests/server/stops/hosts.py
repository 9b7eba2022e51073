"""What runs the server in each stop: the launcher, below `make` or not; the container's supervisor; Triton alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Protocol

from programs.supervisor.supervisors import free_port
from server.servers import ENVIRONMENT, ROOT, new_server
from server.stops.scene import Addresses, CellError
from triton_local.command import server_environment
from triton_local.installation import Interpreter, find_wheel
from triton_local.runtime import cache_root, prepare_runtime
from triton_supervisor.process_table import Process, read_process

GRACE_S = 60
"""For accepted requests."""

_READY_S = 120.0
_POLL_S = 0.05
# make ends with a code of its own, so the launcher's is in a file.
_LAUNCHER = """
import pathlib, sys
from triton_local.cli import main
try:
    main(sys.argv[2:], prog_name="triton_local")
except SystemExit as end:
    pathlib.Path(sys.argv[1]).write_text(str(end.code or 0))
    raise
"""
# The repository of the checkout, and shared memory of its own beside other servers of this machine.
_SUPERVISOR = """
import functools, pathlib, sys
from triton_supervisor.loop import block_signals
block_signals()
from triton_supervisor import cli
from triton_supervisor.shared_memory import prefix_for
cli.plan_container = functools.partial(cli.plan_container, repository=pathlib.Path(sys.argv[1]))
cli.container_prefix = lambda: prefix_for(sys.argv[2])
sys.exit(cli.main(sys.argv[3:]))
"""


class Host(Protocol):
    """A server of the embedded checkpoint in a config, and the processes above it."""

    @property
    def addresses(self) -> Addresses:
        """Where it listens."""

    async def start(self) -> None:
        """Start it, and wait until it is ready. Raises CellError."""

    async def end(self) -> None:
        """Kill what is left."""

    def log(self) -> str:
        """Return the end of its log."""


class _Process:
    """A command in a session of its own, with its output in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def log(self) -> str:
        """Return the end of its output."""
        return _ending(self._log.read_text(errors="replace")) if self._log.exists() else ""

    def _run(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.process

    async def _wait_for(self, ready: Path) -> None:
        assert self.process is not None
        for _ in range(int(_READY_S / _POLL_S)):
            if ready.exists():
                return
            if self.process.poll() is not None:
                break
            await asyncio.sleep(_POLL_S)
        raise CellError(f"the server doesn't become ready: {self.log()[-300:]}")


class Launcher(_Process):
    """`python -m triton_local`, as `make serve` runs it. below_make: make, in its process group, started it."""

    def __init__(self, config: str, folder: Path, below_make: bool = False) -> None:
        super().__init__(folder)
        self._config = config
        self._below_make = below_make
        self._ready = folder / "ready.json"
        self._code = folder / "code"
        self.addresses = Addresses("", "", "")
        self.tritonserver = self.guard = self.pid = 0
        self._below: list[Process] = []

    async def start(self) -> None:
        options = [
            *("--variant", self._config, "--ready-file", str(self._ready), "--stuck-after", "3600"),
            *("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--", f"--exit-timeout-secs={GRACE_S}"),
        ]
        command = [sys.executable, "-c", _LAUNCHER, str(self._code), *options]
        if self._below_make:
            makefile = self.folder / "Makefile"
            script = self.folder / "launcher.sh"
            script.write_text(f"exec {shlex.join(command)}\n")
            makefile.write_text(f"serve:\n\t@exec sh {shlex.quote(str(script))}\n")
            command = ["make", "--file", str(makefile)]
        process = self._run(command, {**os.environ, **ENVIRONMENT})
        await self._wait_for(self._ready)
        facts = json.loads(self._ready.read_text())
        self.addresses = Addresses(facts["http"], facts["grpc"], facts["metrics"])
        self.tritonserver = int(facts["pid"])
        guard = _parent(self.tritonserver)
        launcher = _parent(guard.pid)
        self.guard, self.pid = guard.pid, launcher.pid
        self._below = [guard, launcher]
        assert self._below_make or self.pid == process.pid

    async def wait(self) -> int:
        """Wait until the launcher and make have ended; return the launcher's exit code, 128 + N for signal N."""
        assert self.process is not None
        code = await asyncio.to_thread(self.process.wait)
        if not self._below_make:
            return code if code >= 0 else 128 - code
        return int(self._code.read_text()) if self._code.exists() else 128 + signal.SIGKILL

    async def end(self) -> None:
        # The group of a process that is reaped may be another's; so may the pid of one that has ended.
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for process in self._below:
            if _runs(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


class Supervisor(_Process):
    """The container's supervisor, on this machine: `python -m triton_supervisor` with its state file."""

    def __init__(self, config: str, folder: Path) -> None:
        super().__init__(folder)
        self._config = config
        self.state_file = folder / "state" / "state.json"
        self.addresses = Addresses("", "", "")

    async def start(self) -> None:
        interpreter = Interpreter.current()
        runtime = prepare_runtime(find_wheel(interpreter.site_packages), interpreter, cache_root(os.environ))
        environment = server_environment(runtime, os.environ, None, ENVIRONMENT, grace=GRACE_S, stuck=None)
        ports = [free_port() for _ in range(3)]
        self.addresses = Addresses(*(f"127.0.0.1:{port}" for port in ports))
        options = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
        options += [f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")]
        options += [f"--backend-directory={runtime.backends}", f"--cache-directory={runtime.caches}"]
        own = {
            "PATH": f"{runtime.wheel.tritonserver.parent}:{environment['PATH']}",
            "TRITON_STATE_FILE": str(self.state_file),
            "TRITON_MODEL_CONFIG": self._config,
            "TRITON_GRACE_SECONDS": str(GRACE_S),
            # No probe's token among the counted requests.
            "TRITON_STUCK_SECONDS": "0",
        }
        where = [str(ROOT / "model_repository"), uuid.uuid4().hex[:12]]
        self._run([sys.executable, "-c", _SUPERVISOR, *where, *options], {**environment, **own})
        while self._state() != "serving":
            if self.process is None or self.process.poll() is not None:
                raise CellError(f"the server doesn't become ready: {self.log()[-300:]}")
            await asyncio.sleep(_POLL_S)

    async def announce(self, seconds: float) -> None:
        """Run Kubernetes' preStop hook."""
        hook = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "triton_supervisor", "announce", "--seconds", str(seconds)),
            env={**os.environ, "TRITON_STATE_FILE": str(self.state_file)},
        )
        if await hook.wait() != 0:
            raise CellError("the end isn't announced")

    async def wait(self) -> int:
        """Wait until it has ended; return its exit code, 128 + N for signal N."""
        assert self.process is not None
        code = await asyncio.to_thread(self.process.wait)
        return code if code >= 0 else 128 - code

    async def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            # SIGQUIT kills what it started, too.
            self.process.send_signal(signal.SIGQUIT)
            await asyncio.to_thread(self.process.wait)

    def _state(self) -> str:
        return str(json.loads(self.state_file.read_text())["state"]) if self.state_file.exists() else ""


class Bare:
    """Triton without a supervisor, whose repository API is open."""

    def __init__(self, config: str, folder: Path) -> None:
        self.models = ["llama", "llama_unary"] if config == "streaming" else ["llama"]
        options = ("--model-control-mode=explicit", *(f"--load-model={model}" for model in self.models))
        self._server = new_server(config, options=options, supervised=None)
        self.addresses = Addresses("", "", "")

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)
        self.addresses = Addresses(self._server.http_url, self._server.grpc_url, self._server.metrics_url)

    async def end(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._server.kill()
        await asyncio.to_thread(self._server.stop)

    def log(self) -> str:
        return _ending(self._server.log_text())


def _ending(log: str) -> str:
    return "\n".join([line for line in log.splitlines() if "request answered" not in line][-5:])


def _parent(pid: int) -> Process:
    process = read_process(pid)
    parent = None if process is None else read_process(process.parent)
    if parent is None:
        raise CellError(f"process {pid} is gone before the stop, or its parent is")
    return parent


def _runs(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.started == process.started and not now.ended
