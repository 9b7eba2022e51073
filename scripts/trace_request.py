"""Send one greedy request through the model, without Triton, and list the files of ours that its functions are in.

Every thread counts, so a thread that wakes by the clock, as the metrics' does, may add a file of its own.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


def trace(model_folder: Path) -> list[str]:
    """Return the files of ours, each with a function and a thread, that one greedy request runs through."""
    seen: dict[str, str] = {}
    recording = threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and recording.is_set() and frame.f_code.co_filename.startswith(str(model_folder)):
            file = Path(frame.f_code.co_filename).relative_to(model_folder).as_posix()
            seen.setdefault(file, f"{frame.f_code.co_qualname}, thread {threading.current_thread().name}")

    sys.modules["triton_python_backend_utils"] = _backend_utils()
    sys.path.insert(0, str(model_folder))
    # Before the model is loaded, because the engine's threads begin there.
    threading.setprofile(note)
    from model import TritonPythonModel

    model = TritonPythonModel()
    config = {"max_batch_size": 32, "parameters": {name: {"string_value": value} for name, value in _SETTINGS.items()}}
    instance = {"model_instance_name": "llama_0_0", "model_instance_kind": "CPU", "model_instance_device_id": "0"}
    model.initialize({"model_config": json.dumps(config), "model_name": "llama", "model_version": "1", **instance})
    request = _Request()
    sys.setprofile(note)
    recording.set()
    model.execute([cast("Any", request)])
    if not request.answered.wait(60) or request.error is not None:
        raise RuntimeError(f"the request was not answered: {request.error}")
    # The request's line of the log comes after its answer.
    time.sleep(0.1)
    recording.clear()
    sys.setprofile(None)
    model.finalize()
    return [f"{file}: {first}" for file, first in sorted(seen.items())]


_SETTINGS = {"quantization": "int8", "scheduling": "inflight"}


class _Tensor:
    def __init__(self, name: str, array: NDArray[Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        return self._array


class _Request:
    """A greedy request as Triton hands it over, its response sender, and its response: an error or None."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.error: object = None

    def inputs(self) -> list[_Tensor]:
        values = {
            "text_input": np.array([[b"Return a list of"]], dtype=np.object_),
            "max_tokens": np.array([[8]], dtype=np.int32),
            # Left out, these would take the checkpoint's own values, which sample.
            "temperature": np.zeros((1, 1), dtype=np.float32),
            "repetition_penalty": np.ones((1, 1), dtype=np.float32),
        }
        return [_Tensor(name, array) for name, array in values.items()]

    def get_response_sender(self) -> _Request:
        return self

    def send(self, response: object = None, flags: int = 0) -> None:
        self.error = response
        if flags:
            self.answered.set()

    def is_cancelled(self) -> bool:
        return False

    def parameters(self) -> str:
        return "{}"

    def request_id(self) -> str:
        return "house"

    def timeout(self) -> int:
        return 0


def _backend_utils() -> ModuleType:
    """Return a stand-in for what the model takes from Triton's Python backend."""
    numbers = itertools.count()
    nothing = type("Nothing", (), {"__getattr__": lambda self, name: lambda *args, **kwargs: None})
    family = type("MetricFamily", (), {"__init__": lambda self, **_: None, "Metric": lambda self, **_: nothing()})
    for kind in ("COUNTER", "GAUGE", "HISTOGRAM"):
        setattr(family, kind, next(numbers))
    codes = {code: next(numbers) for code in ("CANCELLED", "INTERNAL", "INVALID_ARG", "UNAVAILABLE")}
    module = ModuleType("triton_python_backend_utils")
    module.__dict__.update(
        Logger=nothing(),
        MetricFamily=family,
        Tensor=_Tensor,
        TritonError=type("TritonError", (Exception,), codes),
        TritonModelException=type("TritonModelException", (Exception,), {}),
        InferenceRequest=_Request,
        InferenceResponseSender=_Request,
        InferenceResponse=lambda outputs=(), error=None: error,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    return module
