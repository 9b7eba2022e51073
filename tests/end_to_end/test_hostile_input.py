"""Hostile requests over HTTP and gRPC get a text or a clear error, and the server goes on with the same bits.

Hypothesis draws values for every input, the same in each run; docs/limits.md has what ends Triton 2.51 itself.
"""

from __future__ import annotations

import json
import math
from typing import Any

import grpc
from end_to_end.servers import HTTP, TIMEOUT_S
from end_to_end.wires import DTYPES, UNARY, model_url
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from llama_engine.request.parameters import GUIDE_TYPES, SAMPLING_PARAMETERS
from triton_local.server import LocalTriton
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

DRAWN = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)

# Triton's own refusals of malformed JSON have a server's status.
NOT_A_REQUEST = (
    "failed to parse the request JSON buffer: ",
    "Unable to parse ",
    "attempt to get members for non-object",
    "failed to get request params.: attempt to get members for non-object",
    "parameter key '",
)

SIZES = st.sampled_from([0, 1, -1, 2, 64, 65, 2**31 - 1, 2**31, 2**63 - 1, 2**64, -(2**31), -(2**63), 10**40])
NUMBERS = st.integers(-3, 70) | SIZES | st.sampled_from([0.1, -0.0, 3.5e38, math.nan, -math.inf]) | st.floats()
TEXTS = st.text(max_size=30) | st.sampled_from(
    ["", "\0", "\ufeff", "\ud800", "a\udfff", "</s><s>", "\r\n\r\n", "word " * 9999, "\u00e9" * 9999, '"' * 999]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
GUIDES = st.text(max_size=30) | st.sampled_from(
    [
        *("", "(", "(a+)+$", "(a{1,1000}){1,1000}", "[a-z]{1,100000}", "(?=a)b", r"\1", "(" * 5000 + ")" * 5000),
        *("{", "true", "[]", '{"enum": []}', '{"$ref": "#"}', '{"$ref": "file:///etc/passwd"}', "{}"),
        *('{"type": "string", "maxLength": 1000000000}', '{"anyOf": ' * 60 + "[]" + "}" * 60),
        *("root ::= root", "root ::= root root | root", 'start: "a"~1..1000000', '{"structures": []}'),
    ]
)
JSON_OF_FIELDS = st.dictionaries(st.sampled_from([*SAMPLING_PARAMETERS, "x", "-1", "5"]), ANYTHING, max_size=4)
OTHERS: SearchStrategy[dict[str, object]] = st.one_of(
    st.dictionaries(st.sampled_from([*DTYPES]) | st.text(max_size=8), ANYTHING, min_size=1, max_size=3),
    st.fixed_dictionaries(
        {"guided_decoding_guide_type": st.sampled_from(GUIDE_TYPES), "guided_decoding_guide": GUIDES}
    ),
    st.fixed_dictionaries({"sampling_parameters": JSON_OF_FIELDS.map(json.dumps)}),
    st.fixed_dictionaries({"logit_bias": JSON_OF_FIELDS.map(json.dumps)}),
)
# A prompt, so that most are refused for something else, and few tokens, so that what is computed is short.
INPUTS = OTHERS.map(lambda others: {"text_input": "The class", "max_tokens": 3, **others})

_VALUES: dict[str, tuple[str, SearchStrategy[Any]]] = {
    "INT32": ("int_contents", st.integers(-(2**31), 2**31 - 1)),
    "UINT64": ("uint64_contents", st.integers(0, 2**64 - 1)),
    "FP32": ("fp32_contents", st.floats(width=32)),
    "BOOL": ("bool_contents", st.booleans()),
    "BYTES": ("bytes_contents", st.binary(max_size=30)),
}


def _good(server: LocalTriton) -> object:
    """Return the response to a good request, with every bit of its probabilities."""
    request = {"text_input": "Good", "max_tokens": 8, "min_tokens": 8, "temperature": 1.0, "seed": 1, "num_logprobs": 3}
    return HTTP.post(model_url(server, "generate"), json=request).raise_for_status().json()


def test_hostile_inputs_over_http_get_a_text_or_are_refused(streaming: LocalTriton) -> None:
    good = _good(streaming)

    @DRAWN
    @given(INPUTS)
    def send(inputs: dict[str, object]) -> None:
        body = json.dumps(inputs).encode()
        response = HTTP.post(model_url(streaming, "generate"), content=body)
        if response.status_code == 200:
            assert isinstance(response.json()["text_output"], str)
        else:
            error = response.json()["error"]
            assert response.status_code == 400 or error.startswith(NOT_A_REQUEST), error
            assert "Traceback" not in error

    send()
    assert _good(streaming) == good


@st.composite
def _tensor_requests(draw: st.DrawFn) -> service_pb2.ModelInferRequest:
    """Draw a request whose tensors have the contract's types and any values, or types and shapes of others."""
    request = service_pb2.ModelInferRequest(model_name=UNARY, id=draw(st.text(max_size=5)))
    names = draw(st.lists(st.sampled_from([*DTYPES]) | st.text(max_size=5), max_size=3, unique=True))
    for name in ["text_input", *{*names} - {"text_input"}]:
        dtype = DTYPES.get(name, "INT32")
        contents, values = _VALUES[dtype]
        elements = [b"The class"] if name == "text_input" else draw(st.lists(values, max_size=3))
        tensor = request.inputs.add(name=name, datatype=dtype)
        tensor.shape.extend([1, len(elements)])
        getattr(tensor.contents, contents).extend(elements)
        if draw(st.integers(1, 8)) == 1:
            tensor.datatype = draw(st.sampled_from(["FP64", "INT8", "BYTES", "", "x"]))
            tensor.shape[:] = draw(st.lists(st.integers(-1, 4), max_size=3))
    return request


def test_hostile_tensors_over_grpc_get_a_text_or_are_refused(streaming: LocalTriton) -> None:
    good = _good(streaming)
    with grpc.insecure_channel(streaming.grpc_url) as channel:
        stub = GRPCInferenceServiceStub(channel)

        @DRAWN
        @given(_tensor_requests())
        def send(request: service_pb2.ModelInferRequest) -> None:
            call = stub.ModelInfer.future(request, timeout=TIMEOUT_S)
            assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), call.details()
            assert "Traceback" not in str(call.details())

        send()
    assert _good(streaming) == good
