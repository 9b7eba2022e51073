"""A launcher in a process of its own, and its processes as seen from outside."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from programs.supervisor.supervisors import until
from triton_supervisor.process_table import children, model_processes

FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
SOON_S = 20.0


@dataclass
class Launcher:
    """A launcher in a process of its own; `facts` is the content of its ready file."""

    process: subprocess.Popen[str]
    ready_file: Path

    def facts(self) -> dict[str, str]:
        until(lambda: self.ready_file.exists() or self.process.poll() is not None)
        assert self.ready_file.exists(), self.process.communicate()
        facts: dict[str, str] = json.loads(self.ready_file.read_text())
        return facts


Launch = Callable[..., Launcher]


def get(url: str) -> str:
    with urllib.request.urlopen(f"http://{url}", timeout=10) as response:
        return str(response.read().decode())


def generate(address: str, text: str) -> str:
    body = json.dumps({"text_input": text}).encode()
    request = urllib.request.Request(f"http://{address}/v2/models/llama/generate", body)
    with urllib.request.urlopen(request, timeout=20) as response:
        return str(json.load(response)["text_output"])


def session_of(pid: int) -> set[int]:
    """The running processes in the session of tritonserver `pid`: the guard, tritonserver, the stub."""
    session = os.getsid(pid)
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has ended
        if int(its_session) == session and state != "Z":
            found.add(int(stat.parent.name))
    return found


def loading_tritonserver(launcher: Launcher) -> int:
    """The pid of the tritonserver below `launcher`, once the stub is loading the model."""
    found: list[int] = []

    def stub_runs() -> bool:
        assert launcher.process.poll() is None, launcher.process.communicate()
        servers = [server.pid for guard in children(launcher.process.pid) for server in children(guard.pid)]
        found.extend(server for server in servers if model_processes(server))
        return bool(found)

    until(stub_runs)
    return found[0]


def shared_memory_of(pid: int) -> set[Path]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in maps if "/dev/shm/triton_python_backend_shm_region_" in line}
