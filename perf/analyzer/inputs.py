"""Requests as perf_analyzer reads them (--input-data): every input of the contract, in every request.

Triton batches only requests with the same set of inputs, so the client's own full set is sent, and perf_analyzer makes
up nothing by itself (it would send random numbers as `max_tokens`). Each request has its own length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from triton_llama.sampling_params import SamplingParams
from triton_llama.tensors import Tensor, prepare

from perf.load.protocols import Request


def document(requests: Sequence[Request]) -> str:
    """Return the JSON of these requests, in their order."""
    return json.dumps({"data": [_entry(request) for request in requests]})


def _entry(request: Request) -> dict[str, object]:
    params = SamplingParams(
        max_tokens=request.output_tokens,
        # No end token, no stop word before all of them are there.
        min_tokens=request.output_tokens,
        temperature=0.0,
        # Greedy rows draw nothing; but drawn at random it would be another file every time.
        seed=0,
    )
    return {tensor.name: _value(tensor) for tensor in prepare(request.prompt, params).tensors}


def _value(tensor: Tensor) -> dict[str, object]:
    # perf_analyzer adds the batch dimension itself.
    (values,) = tensor.values.tolist()
    content = [value.decode() if isinstance(value, bytes) else value for value in values]
    return {"content": content, "shape": [len(content)]}
