"""NVIDIA Dynamo on this machine: its frontend, and two workers, each with a Triton of its own."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
from adjacent_ports import adjacent_ports
from end_to_end.clients.environments import installed
from end_to_end.servers import ENVIRONMENT, until
from triton_local.ports import Service, choose_ports
from triton_local.server import LocalTriton

HOST = "127.0.0.1"
_FREE: dict[Service, int] = {"http": 0, "grpc": 0, "metrics": 0, "openai": 0}


class Replica:
    """A Triton and its worker. A Triton that is started again has the ports of the one before."""

    def __init__(self, site: Site, number: int) -> None:
        self._site = site
        self._ports = choose_ports(HOST, _FREE)
        self.kv_events = f"tcp://{HOST}:{adjacent_ports(2)}"
        self.log = site.home / f"worker{number}.log"
        self.triton = self._new_triton()
        self.worker: subprocess.Popen[bytes] | None = None

    def _new_triton(self) -> LocalTriton:
        return LocalTriton(
            variant="streaming",
            environment={**ENVIRONMENT, "LLAMA_KV_EVENTS": self.kv_events},
            http_port=self._ports["http"],
            grpc_port=self._ports["grpc"],
            metrics_port=self._ports["metrics"],
        )

    def start_worker(self) -> None:
        """Start it and wait until the frontend knows one worker more."""
        expected = self._site.workers() + 1
        options = ["--triton", f"{HOST}:{self._ports['grpc']}", "--triton-metrics", f"{HOST}:{self._ports['metrics']}"]
        options += ["--kv-events", self.kv_events]
        self.worker = self._site.start("triton_llama_dynamo", options, self.log)
        self._site.await_workers(expected)

    def kill_worker(self) -> None:
        """SIGKILL it."""
        assert self.worker is not None
        self.worker.kill()
        self.worker.wait()

    def terminate(self) -> None:
        """SIGTERM Triton and worker together, as a pod's end does."""
        assert self.worker is not None
        self.triton.terminate()
        self.worker.terminate()

    def kill_triton(self) -> None:
        """SIGKILL tritonserver and its models' processes."""
        if self.triton.pid:
            self.triton.kill()
        self.triton.stop()

    def restart_triton(self) -> None:
        """Start a Triton anew; its worker, which waits for it, serves again."""
        expected = self._site.workers() + 1
        self.triton = self._new_triton()
        self.triton.start()
        self._site.await_workers(expected)


class Site:
    """Everything, as a context; files in `home` take the place of etcd."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port = choose_ports(HOST, {"http": 0})["http"]
        self.base_url = f"http://{HOST}:{self._port}/v1"
        self.replicas = [Replica(self, number) for number in range(2)]
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

    def __enter__(self) -> Site:
        with ExitStack() as failed:
            failed.callback(self.close)
            options = ["--http-host", HOST, "--http-port", str(self._port), "--router-mode", "kv"]
            self.start("dynamo.frontend", [*options, "--migration-limit", "3"], self.home / "frontend.log")
            for replica in self.replicas:
                replica.triton.start()
            for replica in self.replicas:
                replica.start_worker()
            failed.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        for replica in self.replicas:
            replica.kill_triton()

    def start(self, module: str, options: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a module of the environment. log: gets its output."""
        command: list[str | Path] = [installed("dynamo") / "bin" / "python", "-m", module, *options]
        with log.open("ab") as written:
            process = subprocess.Popen(command, env=self.environment, stdout=written, stderr=written, cwd=self.home)
        self._processes.append(process)
        return process

    def workers(self) -> int:
        """Return how many workers take requests, as the frontend sees it."""
        try:
            health = httpx.get(f"http://{HOST}:{self._port}/health").json()
        except httpx.TransportError:
            return 0
        return sum(instance["endpoint"] == "generate" for instance in health["instances"])

    def requests(self) -> list[int]:
        """Return how many requests each Triton has answered."""
        pattern = r'^nv_inference_request_success\{model="llama",version="1"\} (\d+)'
        pages = [httpx.get(f"http://{replica.triton.metrics_url}/metrics").text for replica in self.replicas]
        return [int(count) for page in pages for count in re.findall(pattern, page, re.MULTILINE)]

    def await_workers(self, number: int) -> None:
        """Wait until there are so many, and they serve the model."""
        until(lambda: self.workers() == number and self._lists_a_model(), lambda: f"{number} workers serve")

    def _lists_a_model(self) -> bool:
        return bool(httpx.get(f"{self.base_url}/models").json()["data"])
