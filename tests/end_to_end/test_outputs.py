"""The optional outputs over Triton: shapes and names. Their values are tested in tests/engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tritonclient.grpc
from end_to_end.streams import GrpcStream
from end_to_end.wires import tensors
from numpy.typing import NDArray
from triton_local.server import LocalTriton

# Nothing is masked, so that greedy sampling takes the likeliest token.
TWELVE: dict[str, object] = {
    "text_input": "Return a list of the", "max_tokens": 12, "ignore_eos": True, "temperature": 0.0,
    "repetition_penalty": 1.0,
}  # fmt: skip
OPTIONS = {"return_log_probs": True, "num_logprobs": 2, "prompt_logprobs": 1, "return_perf_metrics": True}
TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
ALWAYS = {"text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "stop_reason", "num_cached_tokens"}
ALWAYS |= {"num_accepted_draft_tokens", "num_rejected_draft_tokens"}
OPTIONAL = {"output_log_probs", "cum_log_probs", "logprobs", "prompt_logprobs", *TIMES}


def _outputs(server: LocalTriton, **inputs: object) -> dict[str, NDArray[Any]]:
    """Ask over gRPC; return every output by name."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        result = client.infer("llama", tensors(tritonclient.grpc.InferInput, inputs), client_timeout=120)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def test_only_requested_outputs_are_returned(triton: LocalTriton) -> None:
    plain, requested = _outputs(triton, **TWELVE), _outputs(triton, **TWELVE, **OPTIONS)
    assert (set(plain), set(requested)) == (ALWAYS, ALWAYS | OPTIONAL)
    assert requested["text_output"].tolist() == plain["text_output"].tolist()
    shapes = {name: output.shape for name, output in requested.items()}
    assert shapes == {**dict.fromkeys(requested, (1,)), "output_log_probs": (1, 12)}
    likeliest = [next(iter(entries.values())) for entries in json.loads(requested["logprobs"][0])]
    assert np.allclose([entry["logprob"] for entry in likeliest], requested["output_log_probs"][0], atol=1e-6)
    assert len(json.loads(requested["prompt_logprobs"][0])) == plain["num_input_tokens"][0]
    times = [int(requested[name][0]) for name in TIMES]
    assert times == sorted(times)


def test_a_stream_has_exactly_the_outputs_that_its_request_names(streaming: LocalTriton) -> None:
    names = ["text_output", "num_output_tokens"]
    requested = [tritonclient.grpc.InferRequestedOutput(name) for name in names]
    with GrpcStream(streaming) as stream:
        stream.ask({**TWELVE, "stream": True}, outputs=requested)
        responses = stream.outputs()
    assert all(set(outputs) == {*names} for outputs in responses)
    assert sum(int(outputs["num_output_tokens"][0]) for outputs in responses) == 12
