"""Tritonservers under their supervisors, at ports that stay, and what happens to them: kills and a rolling restart."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
from triton_local.ports import SERVICES, Service
from triton_local.server import LocalTriton
from triton_supervisor.process import model_processes

ENVIRONMENT = {
    # Two servers on two cores.
    "OMP_NUM_THREADS": "1",
    "LLAMA_LOG_REQUESTS": "none",
    "TRITON_GRACE_SECONDS": "60",
    # Not the defaults, 5 within 10 minutes: the supervisor's pauses grow with the deaths of the last minute alone.
    "TRITON_RESTARTS": "1000",
    "TRITON_RESTART_MINUTES": "1",
}
_READY_S = 300.0
_POLL_S = 0.1


class Tritons:
    """`count` servers of a checkpoint, in the environment and ENVIRONMENT. A context manager."""

    def __init__(self, count: int, checkpoint: Path) -> None:
        """Start nothing."""
        self._checkpoint = checkpoint
        self.servers = [self._new(dict.fromkeys(SERVICES, 0)) for _ in range(count)]

    def __enter__(self) -> Tritons:
        try:
            with ThreadPoolExecutor() as threads:
                list(threads.map(LocalTriton.start, self.servers))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def addresses(self) -> str:
        """Their gRPC addresses, as the endpoint takes them."""
        return ",".join(server.grpc_url for server in self.servers)

    def stop(self) -> None:
        """End them."""
        with ThreadPoolExecutor() as threads:
            list(threads.map(LocalTriton.stop, self.servers))

    def restart(self, number: int) -> None:
        """End a server gracefully and start another one at its ports. Raises a LauncherError if that doesn't start."""
        server = self.servers[number]
        ports = {service: int(url.rpartition(":")[2]) for service, url in server.urls.items()}
        server.stop()
        self.servers[number] = self._new(ports)
        self.servers[number].start()

    def _new(self, ports: Mapping[Service, int]) -> LocalTriton:
        return LocalTriton(
            variant="streaming",
            model=str(self._checkpoint),
            environment=ENVIRONMENT,
            http_port=ports["http"],
            grpc_port=ports["grpc"],
            metrics_port=ports["metrics"],
            ready_timeout=_READY_S,
            on_log_line=_show_supervisors,
        )


def processes(server: LocalTriton) -> dict[str, psutil.Process]:
    """Return what may die of a server: tritonserver and the models' processes, by the model's name."""
    named: dict[str, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        named["tritonserver"] = psutil.Process(server.pid)
        for process in model_processes(server.pid):
            # …/REPOSITORY/MODEL/1/model.py
            (program,) = (word for word in process.cmdline() if word.endswith("/1/model.py"))
            named[Path(program).parents[1].name] = process
    return named


def kill_at_random(tritons: Tritons, over: threading.Event, pause: float, seconds: float) -> Counter[str]:
    """Send SIGKILL to one process of each server some time after it began to serve; return how many by name.

    pause: that time in seconds, on average. seconds: for all, unless it is `over` before.
    """
    chance = random.Random(0)
    killed: Counter[str] = Counter()
    # As many of each kind, in a random order.
    bag: list[str] = []
    # By tritonserver's pid.
    due: dict[int, float] = {}
    deadline = time.monotonic() + seconds
    while not over.wait(_POLL_S) and (now := time.monotonic()) < deadline:
        for server in tritons.servers:
            pid = server.pid
            if server.exit_code is not None or now < due.setdefault(pid, now + chance.uniform(0.5, 1.5) * pause):
                continue
            due[pid] = math.inf
            choices = processes(server)
            bag = bag or chance.sample(sorted(choices), len(choices))
            name = bag.pop()
            # It may have ended by itself.
            with suppress(KeyError, psutil.NoSuchProcess):
                choices[name].kill()
                killed[name] += 1
    return killed


def restart_all(tritons: Tritons, over: threading.Event) -> Counter[str]:
    """Restart one server after the other; return how many, as "restarts"."""
    for number in range(len(tritons.servers)):
        tritons.restart(number)
    return Counter(restarts=len(tritons.servers))


def _show_supervisors(line: str) -> None:
    if line.startswith("triton_supervisor: "):
        print(line, flush=True)
