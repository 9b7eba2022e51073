"""Tritonservers at ports that stay, each started again whenever it has ended, and what happens to them.

Restarting is the orchestrator's, such as compose's `restart: unless-stopped`; here a thread for each server does it.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from triton_local.ports import SERVICES, Service
from triton_local.server import LocalTriton

from perf.environment import family
from perf.servers.running import held_port

ENVIRONMENT = {
    # Two servers on two cores.
    "OMP_NUM_THREADS": "1",
    "LLAMA_LOG_REQUESTS": "none",
    "TRITON_GRACE_SECONDS": "60",
}
_READY_S = 300.0
_POLL_S = 0.1


class RestartedTriton:
    """A server of a checkpoint at these ports, started again when it has ended, with whatever exit code.

    pauses: seconds from each end until the next one was ready.
    """

    def __init__(self, checkpoint: Path, ports: Mapping[Service, int]) -> None:
        """Start nothing."""
        self._checkpoint, self._ports = checkpoint, ports
        self.local = self._new()
        self.pauses: list[float] = []
        self._stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._restarts: Future[None] = Future()

    def start(self) -> None:
        """Start it, and wait until it is ready. Raises a LauncherError."""
        self.local.start()
        self._restarts = self._thread.submit(self._restart)

    def stop(self) -> None:
        """End it for good. Raises the LauncherError of a restart that failed."""
        self._stopping.set()
        self._thread.shutdown()
        self.local.stop()
        if self._restarts.done():
            self._restarts.result()

    def restart(self) -> None:
        """End it gracefully, and wait until it is ready again."""
        restarts = len(self.pauses)
        self.local.terminate()
        self.wait_until(lambda: len(self.pauses) > restarts)

    def is_ready(self) -> bool:
        """Return whether Triton says that the model is ready."""
        url = f"http://127.0.0.1:{self._ports['http']}/v2/models/llama/ready"
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
        return False

    def processes(self) -> dict[str, psutil.Process]:
        """Return what may die: tritonserver and the models' processes, by the model's name."""
        named: dict[str, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            for process in family(self.local.pid):
                if process.name() == "tritonserver":
                    named["tritonserver"] = process
                # …/REPOSITORY/MODEL/1/model.py
                programs = (Path(word) for word in process.cmdline() if word.endswith("/1/model.py"))
                named |= {program.parents[1].name: process for program in programs}
        return named

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Raise the LauncherError of a restart that failed meanwhile, or TimeoutError."""
        deadline = time.monotonic() + _READY_S
        while not condition():
            if self._restarts.done():
                self._restarts.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.local.grpc_url} isn't ready after {_READY_S:g} s")
            time.sleep(_POLL_S)

    def _restart(self) -> None:
        while not self._stopping.wait(_POLL_S):
            if self.local.exit_code is None:
                continue
            ended, code = time.monotonic(), self.local.wait()
            # Removes its folder.
            self.local.stop()
            following = self._new()
            following.start()
            self.local = following
            self.pauses.append(time.monotonic() - ended)
            print(f"{self.local.grpc_url} ended with code {code}; ready after {self.pauses[-1]:.1f} s", flush=True)

    def _new(self) -> LocalTriton:
        return LocalTriton(
            variant="streaming",
            model=str(self._checkpoint),
            environment=ENVIRONMENT,
            http_port=self._ports["http"],
            grpc_port=self._ports["grpc"],
            metrics_port=self._ports["metrics"],
            ready_timeout=_READY_S,
        )


class Tritons:
    """`count` servers of a checkpoint in ENVIRONMENT. A context manager."""

    def __init__(self, count: int, checkpoint: Path) -> None:
        """Start nothing."""
        self._count, self._checkpoint = count, checkpoint
        self._ports = ExitStack()
        self.servers: list[RestartedTriton] = []

    def __enter__(self) -> Tritons:
        for _ in range(self._count):
            # Held between an end and the next start, too.
            ports = {service: self._ports.enter_context(held_port()) for service in SERVICES}
            self.servers.append(RestartedTriton(self._checkpoint, ports))
        try:
            with ThreadPoolExecutor() as threads:
                list(threads.map(RestartedTriton.start, self.servers))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with self._ports, ThreadPoolExecutor() as threads:
            list(threads.map(RestartedTriton.stop, self.servers))

    @property
    def addresses(self) -> str:
        """Their gRPC addresses, as the endpoint takes them."""
        return ",".join(server.local.grpc_url for server in self.servers)


def kill_at_random(tritons: Tritons, over: threading.Event, pause: float, seconds: float) -> Counter[str]:
    """Send SIGKILL to one process of each server some time after it began to serve; return how many by name.

    pause: that time in seconds, on average. seconds: for all, unless it is `over` before.
    """
    deadline = time.monotonic() + seconds

    def kills(number: int, server: RestartedTriton) -> Counter[str]:
        chance, killed = random.Random(number), Counter[str]()
        # As many of each kind, in a random order.
        names = itertools.cycle(chance.sample(sorted(kinds), len(kinds)))
        while True:
            server.wait_until(server.is_ready)
            if over.wait(min(chance.uniform(0.5, 1.5) * pause, max(deadline - time.monotonic(), 0))):
                return killed
            if time.monotonic() >= deadline:
                return killed
            before, name = server.processes(), next(names)
            # It may have ended by itself.
            with suppress(KeyError, psutil.NoSuchProcess):
                before[name].kill()
                killed[name] += 1
            server.wait_until(lambda before=before: _is_another(server, before))  # type: ignore[misc]

    kinds = tritons.servers[0].processes()
    with ThreadPoolExecutor() as threads:
        return sum(threads.map(kills, itertools.count(), tritons.servers), Counter())


def restart_all(tritons: Tritons, over: threading.Event) -> Counter[str]:
    """Restart one server after the other, unless it is `over`; return how many, as "restarts"."""
    restarts = Counter[str]()
    for server in tritons.servers:
        if not over.is_set():
            server.restart()
            restarts["restarts"] += 1
    return restarts


def _is_another(server: RestartedTriton, before: Mapping[str, psutil.Process]) -> bool:
    """Return whether another tritonserver than before runs."""
    now = server.processes()
    return "tritonserver" in now and now["tritonserver"] != before.get("tritonserver")
