"""A launcher in a process of its own, its processes as seen from outside, and a stand-in for the model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from deploy.supervisor.supervisors import alive
from end_to_end.servers import EMBEDDED, HTTP, until
from triton_supervisor.process import model_processes

ENDS_S = 60.0
CONFIG = """
name: "llama"
backend: "python"
max_batch_size: 8
input [ { name: "text_input" data_type: TYPE_STRING dims: [1] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [1] } ]
dynamic_batching { }
"""

MODEL = """
import os
import sys
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info("model says LLAMA_MODEL is " + os.environ.get("LLAMA_MODEL", "unset"))
        print("model runs in " + sys.prefix, flush=True)
        if "REFUSE" in os.environ:
            raise ValueError("slots is 9000: must be in 1 ... 64")
        while "LOAD_WHEN" in os.environ and not Path(os.environ["LOAD_WHEN"]).exists():
            time.sleep(0.05)

    def execute(self, requests):
        while "BUSY" in os.environ and not Path(os.environ["ANSWER_WHEN"]).exists():
            Path(os.environ["TELL_WHEN_RUNNING"]).touch()
            time.sleep(0.05)
        texts = [pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]) for text in texts]
"""


class Launcher:
    """A launcher on free ports, and what it must not leave behind.

    running: a file, there once the model with BUSY has a request; it answers when there is the file `answer`.
    """

    def __init__(self, folder: Path, repository: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._ready_file, self._running, self.answer = (folder / name for name in ("ready.json", "running", "answer"))
        self.processes: set[int] = set()
        self._regions: set[Path] = set()
        defaults = {
            "LLAMA_MODEL": str(EMBEDDED),
            "TELL_WHEN_RUNNING": str(self._running),
            "ANSWER_WHEN": str(self.answer),
        }
        options = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--model-repository={repository}")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "triton_local", *options, f"--ready-file={self._ready_file}", *arguments],
            env={**os.environ, **defaults, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def facts(self) -> dict[str, str]:
        """Return the content of the ready file, once it is there."""
        until(lambda: self._ready_file.exists() or self.process.poll() is not None, lambda: "the ready file is there")
        assert self._ready_file.exists(), self.process.communicate()
        facts: dict[str, str] = json.loads(self._ready_file.read_text())
        self._watch(int(facts["pid"]))
        assert len(self.processes) >= 3, "supervisor, tritonserver, a stub for each model"
        return facts

    def wait_until_loading(self) -> None:
        """Wait until the stub is loading the model."""
        found: list[int] = []

        def stub_runs() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            supervisors = psutil.Process(self.process.pid).children()
            servers = [server.pid for child in supervisors for server in child.children()]
            found.extend(server for server in servers if model_processes(server))
            return bool(found)

        until(stub_runs, lambda: "the stub runs")
        self._watch(found[0])

    def endpoint(self) -> int:
        """Return the pid of the OpenAI endpoint."""
        children = psutil.Process(self.process.pid).children()
        (pid,) = (int(child.pid) for child in children if "triton_llama_openai" in child.cmdline())
        return pid

    @contextlib.contextmanager
    def asked(self, address: str) -> Iterator[Future[str]]:
        """Enter once the model has a request with the text "accepted"; yields its answer, which is the text."""

        def generate() -> str:
            answer = HTTP.post(f"http://{address}/v2/models/llama/generate", json={"text_input": "accepted"})
            return str(answer.raise_for_status().json()["text_output"])

        with ThreadPoolExecutor() as pool:
            answer = pool.submit(generate)
            until(self._running.exists, lambda: "the model has the request")
            yield answer

    def line(self, text: str) -> str:
        """Return the next line of stdout that has this text."""
        assert self.process.stdout is not None
        while text not in (line := self.process.stdout.readline()):
            assert line, f"no line with {text!r}"
        return line

    def is_gone(self) -> bool:
        """Return whether none of its processes and of the stub's shared memory is left."""
        return not any(map(alive, self.processes)) and not any(region.exists() for region in self._regions)

    def ends(self) -> tuple[int, str, str]:
        """Wait for its end, which leaves nothing behind; return the exit code, stdout and stderr."""
        output, errors = self.process.communicate(timeout=ENDS_S)
        assert self.is_gone()
        assert not self._ready_file.exists()
        return self.process.returncode, output, errors

    def _watch(self, tritonserver: int) -> None:
        session = os.getsid(tritonserver)
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == session and alive(pid):
                    self.processes.add(pid)
        maps = Path(f"/proc/{tritonserver}/maps").read_text()
        self._regions |= {Path(path) for path in re.findall(r"/dev/shm/triton_python_backend_shm_region_\S+", maps)}
        assert self._regions


Launch = Callable[..., Launcher]


def own_lines(errors: str) -> list[str]:
    """Return the launcher's and the supervisor's own lines among those of stderr."""
    return [line for line in errors.splitlines() if line.startswith(("triton_local: ", "triton_supervisor: "))]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, text in {
        "config.pbtxt": CONFIG,
        "configs/small.pbtxt": CONFIG.replace("max_batch_size: 8", "max_batch_size: 2"),
        "1/model.py": MODEL,
    }.items():
        (root / "llama" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "llama" / name).write_text(text)
    return root


@pytest.fixture
def launch(repository: Path, tmp_path: Path) -> Iterator[Launch]:
    """Launch; what still runs after the test is killed."""

    def launch(*arguments: str, **environment: str) -> Launcher:
        launcher = Launcher(tmp_path, repository, arguments, environment)
        started.callback(launcher.process.communicate)
        started.callback(launcher.process.kill)
        return launcher

    with ExitStack() as started:
        yield launch
