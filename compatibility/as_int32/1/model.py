"""Converts the UINT32 inputs of ensemble_uint32 to INT32 for llama."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils

MAX_INT32 = np.iinfo(np.int32).max


class TritonPythonModel:
    """One instance of the model."""

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Return each input under its name. Larger values become the INT32 maximum, which llama validates."""
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(tensor.name(), np.minimum(tensor.as_numpy(), MAX_INT32).astype(np.int32))
                    for tensor in request.inputs()
                ]
            )
            for request in requests
        ]
