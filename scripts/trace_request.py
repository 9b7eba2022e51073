"""Send one greedy request through the model, without Triton, and list the files of ours that its functions are in.

Every thread counts, so a thread that wakes by the clock, as the metrics' does, may add a file of its own.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"quantization": "int8", "scheduling": "inflight"}
SECONDS = 60.0


def trace(model_folder: Path) -> list[str]:
    """Return the files of ours, each with a function and a thread, that one greedy request runs through."""
    seen: dict[str, str] = {}
    recording = threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and recording.is_set() and frame.f_code.co_filename.startswith(str(model_folder)):
            file = Path(frame.f_code.co_filename).relative_to(model_folder).as_posix()
            seen.setdefault(file, f"{frame.f_code.co_qualname}, thread {threading.current_thread().name}")

    sys.path[:0] = [str(model_folder), str(ROOT / "tests")]
    from engine import backend_utils

    backend_utils.install()
    # Beside what the tests' stand-in has; nothing of these decides about a request.
    rest = {"Logger": MagicMock(), "MetricFamily": MagicMock(), "TritonModelException": RuntimeError}
    vars(sys.modules["triton_python_backend_utils"]).update(rest)
    # Before the model is loaded, because the engine's threads begin there.
    threading.setprofile(note)
    from model import TritonPythonModel

    model = TritonPythonModel()
    config = {"max_batch_size": 32, "parameters": {name: {"string_value": value} for name, value in SETTINGS.items()}}
    instance = {"model_instance_name": "llama_0_0", "model_instance_kind": "CPU", "model_instance_device_id": "0"}
    model.initialize({"model_config": json.dumps(config), "model_name": "llama", "model_version": "1", **instance})
    request = backend_utils.Request(
        "{}",
        text_input=backend_utils.text("Return a list of"),
        max_tokens=np.array([[8]], dtype=np.int32),
        # Left out, these would take the checkpoint's own values, which sample.
        temperature=np.zeros((1, 1), dtype=np.float32),
        repetition_penalty=np.ones((1, 1), dtype=np.float32),
    )
    sys.setprofile(note)
    recording.set()
    model.execute([cast("Any", request)])
    deadline = time.monotonic() + SECONDS
    while not request.sent and time.monotonic() < deadline:
        time.sleep(0.01)
    if not request.sent or request.sent[0][0].error is not None:
        raise RuntimeError(f"the request was not answered: {request.sent}")
    # The request's line of the log comes after its answer.
    time.sleep(0.1)
    recording.clear()
    sys.setprofile(None)
    model.finalize()
    return [f"{file}: {first}" for file, first in sorted(seen.items())]
