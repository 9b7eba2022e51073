"""Any value of any field, in each way that it can be given, is accepted or refused by name; nothing else is raised."""

import json
import math
from typing import Any

import numpy as np
from engine.parsing import MAX_MODEL_LEN, dtype_of, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from llama_engine.engine.sequence_builder import choices_of
from llama_engine.errors import InvalidRequest, OtherModel
from llama_engine.request.defaults import GenerationDefaults
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.request.parameters import NAMES, PARAMETERS, SAMPLING_PARAMETERS
from llama_engine.request.parser import RequestParser
from llama_engine.text.tokenizer import Tokenizer
from numpy.typing import NDArray

VOCABULARY = 3072
PROMPT = {"text_input": tensor("text_input", ["def f"])}

_numbers = st.sampled_from(
    [0, 1, -1, 2, 16, 17, 20, 21, 3071, 3072, 2**31 - 1, -(2**31), 2**63, 2**64, 10**40, 0.5, -0.0, 1.5, 1e308, 1e-320]
)  # fmt: skip
_texts = st.text(max_size=8) | st.sampled_from(
    ["", "0.5", "1_0", "7", "-1", "٣", "nan", "1e999", "{}", "[]",
     '{"1": 2}', '{"1": 1e999}', "json", "[" * 3000, "\ud800"]
)  # fmt: skip
_scalars = st.none() | st.booleans() | _numbers | st.floats(width=32) | _texts
_values: SearchStrategy[object] = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts | st.just("1"), inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from(list(NAMES))
_ELEMENTS: dict[str, SearchStrategy[Any]] = {
    "STRING": st.binary(max_size=8) | _texts.map(lambda text: text.encode("utf-8", "surrogatepass")),
    "INT32": st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 40),
    "FP32": st.floats(width=32),
    "UINT64": st.integers(0, 2**64 - 1),
    "BOOL": st.booleans(),
}


@st.composite
def _tensors(draw: st.DrawFn) -> dict[str, NDArray[Any]]:
    """Return inputs of their types and shapes, with any values."""
    tensors: dict[str, NDArray[Any]] = {}
    for name in draw(st.lists(_names, max_size=4, unique=True)):
        field = PARAMETERS[NAMES[name]]
        columns = draw(st.integers(0, 4)) if field.is_list else 1
        row = [draw(_ELEMENTS[field.type]) for _ in range(columns)]
        tensors[name] = np.array([row], dtype=dtype_of(name)).reshape(1, columns)
    return tensors


_CASES: SearchStrategy[tuple[dict[str, NDArray[Any]], dict[str, object]]] = st.one_of(
    st.tuples(_tensors(), st.just({})),
    st.tuples(st.just({}), st.dictionaries(_names, _scalars, max_size=3)),
    st.tuples(st.dictionaries(st.sampled_from([*SAMPLING_PARAMETERS, "best_of"]), _values, max_size=3).map(
        lambda values: {"sampling_parameters": tensor("sampling_parameters", [json.dumps(values)])}
    ), st.just({})),
)  # fmt: skip
"""Inputs and request parameters."""


# The same cases in every run.
@settings(
    max_examples=250, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(_CASES)
def test_any_value_of_its_type_is_accepted_or_refused_by_name(
    tokenizer: Tokenizer, case: tuple[dict[str, NDArray[Any]], dict[str, object]]
) -> None:
    """What is accepted keeps its bounds."""
    tensors, parameters = case
    inputs = tensors if "input_ids" in tensors else {**PROMPT, **tensors}
    parser = RequestParser(tokenizer, GenerationDefaults({"max_tokens": 16}), MAX_MODEL_LEN)
    try:
        (request,) = parser.parse(inputs, parameters)
    except (InvalidRequest, OtherModel) as error:
        message = str(error)
        assert len(message) < 600, message
        assert "\n" not in message, message
        known = {*inputs, *parameters, *SAMPLING_PARAMETERS, "guided_decoding_guide", "embedding_bias_weights"}
        assert any(name in message for name in known), message
        message.encode()
    else:
        _assert_within_bounds(request)


def _assert_within_bounds(request: GenerationRequest) -> None:
    assert 1 <= request.max_tokens <= MAX_MODEL_LEN - len(request.prompt_tokens)
    assert 0 <= request.min_tokens <= request.max_tokens
    assert len(request.resume_ids) < request.max_tokens
    assert 0 <= request.temperature <= 2
    assert 0 < request.top_p <= 1
    assert 0 <= request.min_p <= 1
    assert math.isfinite(request.repetition_penalty)
    assert 1 <= len(choices_of(request)) <= 16
    ids = [*request.prompt_tokens, *request.stop_token_ids, *request.allowed_token_ids]
    ids += [token for token, _ in request.logit_bias]
    assert all(type(token) is int and 0 <= token < VOCABULARY for token in ids)
    assert all(math.isfinite(bias) for _, bias in request.logit_bias)
