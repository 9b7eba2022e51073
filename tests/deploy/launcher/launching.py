"""A launcher in a process of its own, and its processes as seen from outside."""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from deploy.supervisor.supervisors import alive
from end_to_end.servers import HTTP, until
from triton_supervisor.process import model_processes

ENDS_S = 60.0
SUPERVISOR = "triton_supervisor: "


@dataclass
class Launcher:
    """A launcher, and what it must not leave behind.

    running: a file, there once the model with BUSY has a request; it answers when there is the file `answer`.
    """

    process: subprocess.Popen[str]
    ready_file: Path
    running: Path
    answer: Path
    processes: set[int] = field(default_factory=set)
    regions: set[Path] = field(default_factory=set)

    def facts(self) -> dict[str, str]:
        """Return the content of the ready file, once it is there."""
        until(lambda: self.ready_file.exists() or self.process.poll() is not None, lambda: "the ready file is there")
        assert self.ready_file.exists(), self.process.communicate()
        facts: dict[str, str] = json.loads(self.ready_file.read_text())
        self._watch(int(facts["pid"]))
        assert len(self.processes) >= 3, "supervisor, tritonserver, a stub for each model"
        return facts

    def loading_tritonserver(self) -> int:
        """Return the pid of tritonserver, once the stub is loading the model."""
        found: list[int] = []

        def stub_runs() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            servers = [
                server.pid for child in psutil.Process(self.process.pid).children() for server in child.children()
            ]
            found.extend(server for server in servers if model_processes(server))
            return bool(found)

        until(stub_runs, lambda: "the stub runs")
        self._watch(found[0])
        return found[0]

    def endpoint(self) -> int:
        """Return the pid of the OpenAI endpoint."""
        (pid,) = (
            int(child.pid)
            for child in psutil.Process(self.process.pid).children()
            if "triton_llama_openai" in Path(f"/proc/{child.pid}/cmdline").read_text()
        )
        return pid

    @contextlib.contextmanager
    def asked(self, address: str) -> Iterator[Future[str]]:
        """Enter once the model has a request with the text "accepted"; yields its answer."""
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(generate, address, "accepted")
            until(self.running.exists, lambda: "the model has the request")
            yield answer

    def line(self, text: str) -> str:
        """Return the next line of stdout that has this text."""
        assert self.process.stdout is not None
        while text not in (line := self.process.stdout.readline()):
            assert line, f"no line with {text!r}"
        return line

    def is_gone(self) -> bool:
        """Return whether none of its processes and of the stub's shared memory is left."""
        return not any(map(alive, self.processes)) and not any(region.exists() for region in self.regions)

    def ends(self) -> tuple[int, str, str]:
        """Wait for its end, which leaves nothing behind; return the exit code, stdout and stderr."""
        output, errors = self.process.communicate(timeout=ENDS_S)
        assert self.is_gone()
        assert not self.ready_file.exists()
        return self.process.returncode, output, errors

    def _watch(self, tritonserver: int) -> None:
        session = os.getsid(tritonserver)
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(folder.name)) == session and alive(int(folder.name)):
                    self.processes.add(int(folder.name))
        maps = Path(f"/proc/{tritonserver}/maps").read_text()
        self.regions |= {Path(path) for path in re.findall(r"/dev/shm/triton_python_backend_shm_region_\S+", maps)}
        assert self.regions


Launch = Callable[..., Launcher]


def supervisor_lines(errors: str) -> list[str]:
    """Return the launcher's lines among those of stderr, and the supervisor's without its name."""
    prefixes = ("triton_local: ", SUPERVISOR)
    return [line.removeprefix(SUPERVISOR) for line in errors.splitlines() if line.startswith(prefixes)]


def generate(address: str, text: str) -> str:
    """Return the stand-in's answer, which is the text."""
    answer = HTTP.post(f"http://{address}/v2/models/llama/generate", json={"text_input": text})
    return str(answer.raise_for_status().json()["text_output"])
