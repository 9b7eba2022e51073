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


class _Process:
    """A command in a session of its own, with its output in a file."""

    process: subprocess.Popen[bytes]

    def __init__(self, config: str, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.addresses = Addresses("", "", "")
        self._log = folder / "log"

    def log(self) -> str:
        """Return the end of its output."""
        return _ending(self._log.read_text(errors="replace")) if self._log.exists() else ""

    async def wait(self) -> int:
        """Wait until it has ended; return its exit code, 128 + N for signal N."""
        code = await asyncio.to_thread(self.process.wait)
        return code if code >= 0 else 128 - code

    async def _run(self, command: list[str], environment: dict[str, str], ready: Path, text: str) -> None:
        """Start it, and wait until a file of its own has this text."""
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
        for _ in range(int(_READY_S / _POLL_S)):
            if ready.exists() and text in ready.read_text():
                return
            if self.process.poll() is not None:
                break
            await asyncio.sleep(_POLL_S)
        raise CellError(f"the server doesn't become ready: {self.log()[-300:]}")


class Launcher(_Process):
    """`python -m triton_local`, as `make serve` runs it. below_make: make, in its process group, started it."""

    def __init__(self, config: str, folder: Path, below_make: bool = False) -> None:
        super().__init__(config, folder)
        self._below_make = below_make
        self._code = folder / "code"
        self.guard = self.pid = 0
        self._below: list[Process] = []

    async def start(self) -> None:
        ready = self.folder / "ready.json"
        options = [
            *("--variant", self.config, "--ready-file", str(ready), "--stuck-after", "3600"),
            *("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--", f"--exit-timeout-secs={GRACE_S}"),
        ]
        command = [sys.executable, "-c", _LAUNCHER, str(self._code), *options]
        if self._below_make:
            makefile, script = self.folder / "Makefile", self.folder / "launcher.sh"
            script.write_text(f"exec {shlex.join(command)}\n")
            makefile.write_text(f"serve:\n\t@exec sh {shlex.quote(str(script))}\n")
            command = ["make", "--file", str(makefile)]
        await self._run(command, {**os.environ, **ENVIRONMENT}, ready, "pid")
        facts = json.loads(ready.read_text())
        self.addresses = Addresses(facts["http"], facts["grpc"], facts["metrics"])
        guard = _parent(int(facts["pid"]))
        launcher = _parent(guard.pid)
        self.guard, self.pid = guard.pid, launcher.pid
        self._below = [guard, launcher]

    async def wait(self) -> int:
        """Wait until the launcher and make have ended; return the launcher's exit code, 128 + N for signal N."""
        code = await super().wait()
        if not self._below_make:
            return code
        return int(self._code.read_text()) if self._code.exists() else 128 + signal.SIGKILL

    async def end(self) -> None:
        # The group of a process that is reaped may be another's; so may the pid of one that has ended.
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for process in self._below:
            now = read_process(process.pid)
            if now is not None and now.started == process.started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


class Supervisor(_Process):
    """The container's supervisor, on this machine: `python -m triton_supervisor` with its state file."""

    def __init__(self, config: str, folder: Path) -> None:
        super().__init__(config, folder)
        interpreter = Interpreter.current()
        runtime = prepare_runtime(find_wheel(interpreter.site_packages), interpreter, cache_root(os.environ))
        environment = server_environment(runtime, os.environ, None, ENVIRONMENT, grace=GRACE_S, stuck=None)
        ports = {name: free_port() for name in Addresses._fields}
        self.addresses = Addresses(*(f"127.0.0.1:{port}" for port in ports.values()))
        options = [f"--{name}-port={port}" for name, port in ports.items()]
        options += [f"--{name}-address=127.0.0.1" for name in ports]
        options += [f"--backend-directory={runtime.backends}", f"--cache-directory={runtime.caches}"]
        self.state = {"TRITON_STATE_FILE": str(self.folder / "state" / "state.json")}
        own = {
            **self.state,
            "PATH": f"{runtime.wheel.tritonserver.parent}:{environment['PATH']}",
            "TRITON_MODEL_CONFIG": self.config,
            "TRITON_GRACE_SECONDS": str(GRACE_S),
            # No probe's token among the counted requests.
            "TRITON_STUCK_SECONDS": "0",
        }
        where = [str(ROOT / "model_repository"), uuid.uuid4().hex[:12]]
        self._command = [sys.executable, "-c", _SUPERVISOR, *where, *options]
        self._environment = {**environment, **own}

    async def start(self) -> None:
        await self._run(self._command, self._environment, Path(self.state["TRITON_STATE_FILE"]), '"serving"')

    async def announce(self, seconds: float) -> None:
        """Run Kubernetes' preStop hook."""
        hook = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "triton_supervisor", "announce", "--seconds", str(seconds)),
            env={**os.environ, **self.state},
        )
        if await hook.wait() != 0:
            raise CellError("the end isn't announced")

    async def end(self) -> None:
        if self.process.poll() is None:
            # SIGQUIT kills what it started, too.
            self.process.send_signal(signal.SIGQUIT)
            await asyncio.to_thread(self.process.wait)


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
