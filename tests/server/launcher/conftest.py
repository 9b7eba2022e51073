"""A stand-in for the model: the launcher's tests are about processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from server.launcher.launching import Launch, Launcher

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
        if "TELL_WHEN_RUNNING" in os.environ:
            Path(os.environ["TELL_WHEN_RUNNING"]).touch()
            time.sleep(float(os.environ.get("EXECUTE_S", "3")))
        texts = [pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]) for text in texts]

    def finalize(self):
        time.sleep(float(os.environ.get("FINALIZE_S", "0")))
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


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache, so that the first start builds the runtime."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_LLAMA_CACHE", str(folder))
        yield folder


@pytest.fixture
def launch(repository: Path, tmp_path: Path) -> Iterator[Launch]:
    def launch(*arguments: str, **environment: str) -> Launcher:
        ready_file = tmp_path / "ready.json"
        options = (f"--model-repository={repository}", f"--ready-file={ready_file}", *arguments)
        process = subprocess.Popen(
            [sys.executable, "-m", "triton_local", *options],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.callback(process.communicate)
        started.callback(process.kill)
        return Launcher(process, ready_file)

    with ExitStack() as started:
        yield launch
