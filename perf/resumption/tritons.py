"""Tritonservers at ports that stay, what ends them, and their start again, as an orchestrator does it at once.

That is such as compose's `restart: unless-stopped`.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from triton_local.envoy import LocalEnvoy
from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.ports import SERVICES, choose_ports
from triton_local.server import LocalTriton

from perf.environment import family

ENVIRONMENT = {
    # Two servers on two cores.
    "OMP_NUM_THREADS": "1",
    "LLAMA_LOG_REQUESTS": "none",
    "TRITON_GRACE_SECONDS": "60",
}
_READY_S = 300.0
_POLL_S = 0.1


class RestartedTriton:
    """A server of a checkpoint at these ports. pauses: seconds from each end until it was ready again."""

    def __init__(self, checkpoint: Path, ports: Mapping[str, int]) -> None:
        """Start nothing."""
        self._checkpoint, self._ports = checkpoint, ports
        self.local = self._new()
        self.pauses: list[float] = []

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process of that name, and start the server again when it has ended.

        Raises KeyError if there is no such process, and what `restart` raises.
        """
        self.processes()[name].kill()
        self._start_again()

    def restart(self) -> None:
        """End it gracefully and start it again. Raises TimeoutError if it does not end, or a LauncherError."""
        self.local.terminate()
        self._start_again()

    def processes(self) -> dict[str, psutil.Process]:
        """Return what may die: tritonserver and the models' processes, by the model's name."""
        named = {"tritonserver": psutil.Process(self.local.pid)}
        for process in family(self.local.pid):
            # …/REPOSITORY/MODEL/1/model.py
            programs = (Path(word) for word in process.cmdline() if word.endswith("/1/model.py"))
            named |= {program.parents[1].name: process for program in programs}
        return named

    def _start_again(self) -> None:
        deadline = time.monotonic() + _READY_S
        while self.local.exit_code is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.local.grpc_address} has not ended after {_READY_S:g} s")
            time.sleep(_POLL_S)
        ended, code = time.monotonic(), self.local.wait()
        # Removes its folder.
        self.local.stop()
        self.local = self._new()
        self.local.start()
        self.pauses.append(time.monotonic() - ended)
        print(f"{self.local.grpc_address} ended with code {code}; ready after {self.pauses[-1]:.1f} s", flush=True)

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


@contextmanager
def running_tritons(count: int, checkpoint: Path) -> Iterator[list[RestartedTriton]]:
    """Yield `count` servers of a checkpoint in ENVIRONMENT, which run during the block."""
    with ExitStack() as held:
        # Between an end and the next start, too.
        ports = [choose_ports("127.0.0.1", dict.fromkeys(SERVICES, 0), held) for _ in range(count)]
        servers = [RestartedTriton(checkpoint, each) for each in ports]
        try:
            with ThreadPoolExecutor() as threads:
                list(threads.map(lambda server: server.local.start(), servers))
            yield servers
        finally:
            with ThreadPoolExecutor() as threads:
                list(threads.map(lambda server: server.local.stop(), servers))


@contextmanager
def in_front_of(servers: Sequence[RestartedTriton], endpoint: OpenAIEndpoint) -> Iterator[str]:
    """Start an endpoint in front of servers, with an Envoy if they are several; yield the URL for clients."""
    if len(servers) == 1:
        endpoint.start(servers[0].local.grpc_address)
        yield f"http://{endpoint.address}"
    else:
        with LocalEnvoy() as envoy:
            envoy.start([server.local for server in servers], [endpoint.address])
            endpoint.start(envoy.address("tritons"))
            yield f"http://{envoy.address('clients')}"


def kill_at_random(
    servers: Sequence[RestartedTriton], over: threading.Event, pause: float, seconds: float
) -> Counter[str]:
    """Send SIGKILL to one process of each server some time after it began to serve; return how many by name.

    pause: that time in seconds, on average. seconds: for all, unless it is `over` before.
    """
    deadline = time.monotonic() + seconds

    def kills(number: int, server: RestartedTriton) -> Counter[str]:
        chance, killed, kinds = random.Random(number), Counter[str](), sorted(server.processes())
        # As many of each kind, in a random order.
        for name in itertools.cycle(chance.sample(kinds, len(kinds))):
            until = time.monotonic() + chance.uniform(0.5, 1.5) * pause
            if over.wait(min(until, deadline) - time.monotonic()) or until > deadline:
                break
            server.kill(name)
            killed[name] += 1
        return killed

    with ThreadPoolExecutor() as threads:
        return sum(threads.map(kills, itertools.count(), servers), Counter())


def restart_all(servers: Sequence[RestartedTriton], over: threading.Event) -> Counter[str]:
    """Restart one server after the other, unless it is `over`; return how many, as "restarts"."""
    restarts = Counter[str]()
    for server in servers:
        if not over.is_set():
            server.restart()
            restarts["restarts"] += 1
    return restarts
