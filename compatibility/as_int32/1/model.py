"""The inputs in INT32 that ensemble_uint32 takes in UINT32."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils

MOST = np.iinfo(np.int32).max


class TritonPythonModel:
    """One instance of the model."""

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Return each input under its name. What exceeds an INT32 is its largest number, which llama judges."""
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(tensor.name(), np.minimum(tensor.as_numpy(), MOST).astype(np.int32))
                    for tensor in request.inputs()
                ]
            )
            for request in requests
        ]
