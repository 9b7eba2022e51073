"""A stand-in for the model: the launcher's tests are about processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from deploy.launcher.launching import Launch, Launcher
from end_to_end.servers import EMBEDDED

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
    """Launch on free ports; what still runs after the test is killed."""

    def launch(*arguments: str, **environment: str) -> Launcher:
        ready_file, running, answer = (tmp_path / name for name in ("ready.json", "running", "answer"))
        options = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--model-repository={repository}")
        process = subprocess.Popen(
            [sys.executable, "-m", "triton_local", *options, f"--ready-file={ready_file}", *arguments],
            env={
                **os.environ,
                "LLAMA_MODEL": str(EMBEDDED),
                "TELL_WHEN_RUNNING": str(running),
                "ANSWER_WHEN": str(answer),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.callback(process.communicate)
        started.callback(process.kill)
        return Launcher(process, ready_file, running, answer)

    with ExitStack() as started:
        yield launch
