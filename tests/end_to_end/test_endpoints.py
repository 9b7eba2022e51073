"""Every endpoint: streams, beside them /infer and unary gRPC through llama_unary, and the config with one response.

A stream's chunks, joined, are the text of one response. Inputs of every type arrive, and outputs have their names and
shapes; what each means is tested in tests/engine.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from end_to_end.servers import EMBEDDED, HTTP
from end_to_end.streams import STREAM_WIRES, GrpcStream, StreamWire, events, sse_response
from end_to_end.wires import (
    BAD,
    UNARY,
    UNARY_WIRES,
    Answer,
    Inputs,
    Refusal,
    Wire,
    ask,
    assert_clean,
    everywhere,
    generate,
    tensors,
    unary_infer,
)
from numpy.typing import NDArray
from tokenizers import Tokenizer
from triton_local.server import LocalTriton

PROMPT = "Return a list of the"
GREEDY = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0.0, "repetition_penalty": 1.2}
HOT = {"text_input": PROMPT, "max_tokens": 60, "min_tokens": 60, "temperature": 2.0, "top_p": 1.0, "top_k": 0}
REQUEST = {"text_input": PROMPT, "max_tokens": 24, "min_tokens": 24, "temperature": 1.0, "seed": 9}
ROWS = {**{name: [[value]] * 3 for name, value in REQUEST.items()}, "seed": [[1], [2], [9]]}

every_unary_wire = pytest.mark.parametrize("wire", UNARY_WIRES, ids=["/infer", "ModelInfer"])


@pytest.fixture
def rows(streaming: LocalTriton) -> list[Answer]:
    """The answers to ROWS, each alone."""
    return [ask(streaming, generate, **REQUEST | {"seed": seed}) for seed in (1, 2, 9)]


@pytest.mark.parametrize("wire", STREAM_WIRES, ids=lambda wire: wire.__name__)
@pytest.mark.parametrize(
    "inputs",
    [
        GREEDY | {"stop_words": ["\n", "the argument"]},
        HOT | {"text_input": "Wäre 🐍 in", "seed": 2**64 - 1, "exclude_input_in_output": False},
        GREEDY | {"max_tokens": 1},
    ],
    ids=["with stop strings", "with its prompt", "one token"],
)
def test_the_chunks_of_a_stream_are_the_text_of_one_response(
    narrow_streaming: LocalTriton, wire: StreamWire, inputs: Inputs
) -> None:
    """The slow model: the tokens of a quick one could all come in one chunk on a busy machine."""
    streamed = wire(narrow_streaming, inputs)
    assert streamed.whole == ask(narrow_streaming, generate, **inputs)
    *before, last = streamed.chunks
    assert bool(before) == (inputs["max_tokens"] != 1)
    assert all(chunk.text for chunk in before), "only the last chunk may be empty"
    assert {(chunk.finish_reason, chunk.num_input_tokens) for chunk in before} <= {("", last.num_input_tokens)}
    assert all(chunk.num_output_tokens >= 1 for chunk in streamed.chunks)


def test_without_stream_there_is_one_final_response(streaming: LocalTriton, rows: list[Answer]) -> None:
    with GrpcStream(streaming) as stream:
        stream.ask(ROWS)
        response = stream.next()
        stream.end()
    assert (response.rows, response.final) == (rows, True)


def test_a_stream_of_several_rows_is_refused(streaming: LocalTriton) -> None:
    with GrpcStream(streaming) as stream:
        stream.ask({**ROWS, "stream": [[False], [True], [False]]})
        response = stream.next()
    assert "stream is true in a batch of 3; it must be false, or the batch size 1" in str(response.error)
    assert not response.rows


def test_a_bad_request_to_generate_stream_has_status_400(streaming: LocalTriton) -> None:
    with sse_response(streaming, REQUEST | {"max_tokens": 0}) as refused:
        assert refused.status_code == 400
        (event,) = events(refused)
    assert "max_tokens is 0" in event["error"]


@every_unary_wire
def test_a_unary_request_gets_what_the_streaming_model_answers(
    streaming: LocalTriton, rows: list[Answer], wire: Wire
) -> None:
    assert wire(streaming, REQUEST) == rows[2:]
    assert wire(streaming, ROWS) == rows


@every_unary_wire
def test_an_error_is_llamas_own(streaming: LocalTriton, wire: Wire) -> None:
    direct, refused = (way(streaming, {**REQUEST, "max_tokens": 10_000}) for way in (generate, wire))
    assert isinstance(direct, Refusal)
    assert refused == direct
    assert refused.kind == BAD
    assert_clean(refused.message)


def test_a_request_for_a_stream_is_refused_by_name(streaming: LocalTriton) -> None:
    refused = unary_infer(streaming, {**REQUEST, "stream": True})
    assert refused == Refusal(BAD, "INVALID_ARG: stream is true; it must be false: llama_unary answers in one response")


def test_request_parameters_reach_the_model(streaming: LocalTriton) -> None:
    tensor = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    body = {"inputs": [tensor], "parameters": {"temprature": 1}}
    refused = HTTP.post(f"http://{streaming.http_address}/v2/models/{UNARY}/infer", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("INVALID_ARG: 'temprature' is no input of this model")


def test_a_forged_request_is_refused_as_one_with_an_unknown_parameter(streaming: LocalTriton) -> None:
    refused = generate(streaming, {"text_input": "a", UNARY: "[1, true]"})
    assert isinstance(refused, Refusal)
    assert refused.kind == BAD
    assert refused.message.startswith(f"INVALID_ARG: '{UNARY}' is no input of this model")


# Nothing is masked, so that greedy sampling takes the likeliest token.
TWELVE: dict[str, object] = {
    "text_input": PROMPT, "max_tokens": 12, "ignore_eos": True, "temperature": 0.0,
    "repetition_penalty": 1.0,
}  # fmt: skip
TOKENIZER = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
(ZEBRA,) = TOKENIZER.encode(" zebra").ids[-1:]


@pytest.mark.parametrize(
    "changed",
    [
        {"max_tokens": 13},
        {"temperature": 2.0, "seed": 2**64 - 1},
        {"bad_words": ["\N{SNOWMAN}", "e"]},
        {"exclude_input_in_output": False},
        {"allowed_token_ids": [ZEBRA]},
        {"embedding_bias_words": [" zebra"], "embedding_bias_weights": [100.0]},
    ],
    ids=",".join,
)
def test_an_input_has_an_effect(triton: LocalTriton, changed: dict[str, object]) -> None:
    assert everywhere(triton, **TWELVE | changed) != everywhere(triton, **TWELVE)


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
