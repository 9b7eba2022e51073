"""What perf_analyzer is told to send is what the client sends, in every request, with each request's own length."""

from __future__ import annotations

import json

from triton_llama.sampling_params import SamplingParams
from triton_llama.tensors import prepare

from perf.analyzer import inputs
from perf.load.protocols import Request

REQUESTS = [Request('a "quoted"\nline', 7), Request("ä€𝄞", 1), Request("c", 380)]


def test_requests_of_every_length_have_the_client_s_set_of_inputs_so_that_triton_batches_them() -> None:
    full_set = [tensor.name for tensor in prepare("any", SamplingParams()).tensors]
    entries = json.loads(inputs.document(REQUESTS))["data"]
    assert [list(entry) for entry in entries] == [full_set] * 3
    assert all(value["shape"] == [1] and len(value["content"]) == 1 for entry in entries for value in entry.values())


def test_prompts_and_lengths_arrive_as_they_were_asked_for() -> None:
    entries = json.loads(inputs.document(REQUESTS))["data"]
    for request, entry in zip(REQUESTS, entries, strict=True):
        assert entry["text_input"]["content"] == [request.prompt]
        # Neither an end token nor chance can make it another length.
        assert entry["max_tokens"]["content"] == entry["min_tokens"]["content"] == [request.output_tokens]
        assert entry["temperature"]["content"] == [0.0]


def test_the_same_requests_are_the_same_file() -> None:
    assert inputs.document(REQUESTS) == inputs.document(REQUESTS)
