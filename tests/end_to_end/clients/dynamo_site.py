"""NVIDIA Dynamo on this machine: its frontend, and a worker for each of two replicas."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
from end_to_end.clients.conftest import Replica
from end_to_end.clients.environments import installed
from end_to_end.servers import until
from triton_local.ports import choose_ports

HOST = "127.0.0.1"


class Site:
    """Everything but the replicas, as a context; files in `home` take the place of etcd."""

    def __init__(self, home: Path, replicas: Sequence[Replica]) -> None:
        self._home = home
        self._port = choose_ports(HOST, {"http": 0})["http"]
        self.base_url = f"http://{HOST}:{self._port}/v1"
        self.replicas = replicas
        self.workers: list[subprocess.Popen[bytes]] = []
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "DYN_FILE_KV": str(home / "discovery"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": HOST,
            "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
            "DYN_EVENT_PLANE_HOST": HOST,
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        options = ["--http-host", HOST, "--http-port", str(self._port), "--router-mode", "kv"]
        self._frontend = self._start("dynamo.frontend", *options, "--migration-limit", "3")

    def __enter__(self) -> Site:
        for replica in self.replicas:
            self.start_worker(replica)
        self.await_workers(len(self.workers))
        return self

    def __exit__(self, *error: object) -> None:
        for process in (*self.workers, self._frontend):
            process.kill()
            process.wait()

    def start_worker(self, replica: Replica) -> None:
        """Start a worker of a replica, the last of `workers`."""
        options = ["--triton", replica.triton.grpc_address, "--triton-metrics", replica.triton.metrics_address]
        kv_events = f"tcp://{HOST}:{replica.kv_events_port}"
        self.workers.append(self._start("triton_llama_dynamo", *options, "--kv-events", kv_events))

    def requests(self) -> list[int]:
        """Return how many requests each Triton has answered."""
        pattern = r'^nv_inference_request_success\{model="llama",version="1"\} (\d+)'
        pages = [httpx.get(f"http://{triton.metrics_address}/metrics").text for triton, _ in self.replicas]
        return [int(count) for page in pages for count in re.findall(pattern, page, re.MULTILINE)]

    def await_workers(self, number: int) -> None:
        """Wait until so many take requests, as the frontend sees it, and serve the model."""
        until(lambda: self._count() == number and self._lists_a_model(), lambda: f"{number} workers serve")

    def _start(self, module: str, *options: str) -> subprocess.Popen[bytes]:
        command: list[str | Path] = [installed("dynamo") / "bin" / "python", "-m", module, *options]
        with (self._home / "log").open("ab") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd=self._home)

    def _count(self) -> int:
        try:
            health = httpx.get(f"http://{HOST}:{self._port}/health").json()
        except httpx.TransportError:
            return 0
        return sum(instance["endpoint"] == "generate" for instance in health["instances"])

    def _lists_a_model(self) -> bool:
        return bool(httpx.get(f"{self.base_url}/models").json()["data"])
