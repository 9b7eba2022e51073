"""Tensors of requests and responses: names, types and shapes of the contract, and values no tensor can hold."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from triton_llama import RejectedInputError, SamplingParams, ServerError
from triton_llama.outputs import read_completion
from triton_llama.tensors import Tensor, decode, prepare

FULL_SET = {
    *("text_input", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "seed", "stop_words", "bad_words", "exclude_input_in_output"),
}
"""The inputs that Triton batches requests by."""


def tensors(prompt: str = "def", /, **sampling: object) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in prepare(prompt, SamplingParams(**sampling)).tensors}  # type: ignore[arg-type]


def test_every_request_has_the_same_set_of_inputs() -> None:
    sent = tensors(seed=7)
    assert sent.keys() == FULL_SET
    assert all(tensor.shape == [1, 1] for tensor in sent.values())


def test_none_leaves_an_input_to_the_checkpoint() -> None:
    assert tensors(top_p=None).keys() == FULL_SET - {"top_p"}
    sent = prepare("def", SamplingParams.from_checkpoint()).tensors
    assert [tensor.name for tensor in sent] == ["text_input", "seed"]


def test_each_request_draws_a_seed_of_its_own() -> None:
    first, second = prepare("def", SamplingParams()), prepare("def", SamplingParams())
    assert first.seed != second.seed
    assert first.request_id != second.request_id
    assert next(tensor for tensor in first.tensors if tensor.name == "seed").values == (first.seed,)


@pytest.mark.parametrize(
    ("name", "value", "encoded"),
    [
        ("seed", 2**63, struct.pack("<Q", 2**63)),
        ("seed", np.uint64(2**64 - 1), b"\xff" * 8),
        ("max_tokens", -5, struct.pack("<i", -5)),
        ("temperature", np.float64(0.1), struct.pack("<f", 0.1)),
        ("exclude_input_in_output", np.bool_(False), b"\x00"),
        ("stop_words", ["\n\n", "é"], b"\x02\x00\x00\x00\n\n\x02\x00\x00\x00\xc3\xa9"),
        ("stop_token_ids", [2, 5], struct.pack("<2i", 2, 5)),
        ("stop_token_ids", [], struct.pack("<i", -1)),
        ("embedding_bias_weights", [], struct.pack("<f", 0)),
    ],
)
def test_a_value_is_encoded_in_its_wire_type(name: str, value: object, encoded: bytes) -> None:
    tensor = tensors("def", **{name: value})[name]
    assert tensor.encode() == encoded
    assert tensor.shape == [1, len(tensor.values)]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 2**31}, "max_tokens is 2147483648, must lie in -2147483648 ... 2147483647"),
        ({"top_k": True}, "top_k is True, must be an integer"),
        ({"seed": -1}, "seed is -1, must lie in 0 ... 18446744073709551615"),
        ({"temperature": "0.5"}, "temperature is '0.5', must be a number"),
        ({"temperature": 1e39}, "temperature is 1e+39, must lie in -3.40282e+38 ... 3.40282e+38 (32-bit float)"),
        ({"temperature": math.nan}, "temperature is nan, must lie in -3.40282e+38 ... 3.40282e+38 (32-bit float)"),
        ({"stop_words": "end"}, "stop_words is 'end', must be a list of strings"),
        ({"stop_words": ["end", 3]}, "stop_words is 3, must be a string"),
        ({"bad_words": ["ab\ud800"]}, "bad_words has '\\ud800' at character 2, must be text that UTF-8 can encode"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, must be a list of integers"),
        ({"exclude_input_in_output": 1}, "exclude_input_in_output is 1, must be True or False"),
    ],
)
def test_refusing_a_value_names_the_field_and_the_bound(sampling: dict[str, object], message: str) -> None:
    with pytest.raises(RejectedInputError) as refusal:
        tensors(**sampling)
    assert str(refusal.value) == message


OUTPUTS: dict[str, list[object]] = {
    "text_output": ["a"],
    "finish_reason": ["stop"],
    "num_input_tokens": [3],
    "num_output_tokens": [5],
}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({}, "lacks the output text_output"),
        ({**OUTPUTS, "num_output_tokens": ["x"]}, "num_output_tokens is 'x', must be an integer"),
        ({**OUTPUTS, "text_output": [1]}, "text_output is 1, must be a string"),
        ({**OUTPUTS, "text_output": ["a", "b"]}, r"about choices \[0, 1\] of 1"),
        ({**OUTPUTS, "text_output": []}, "has 0 texts, must have one"),
        ({**OUTPUTS, "finish_reason": []}, "violates the contract"),
        ({**OUTPUTS, "logprobs": ["["]}, "violates the contract"),
    ],
)
def test_outputs_outside_the_contract_are_the_servers_error(outputs: dict[str, list[object]], message: str) -> None:
    with pytest.raises(ServerError, match=message):
        read_completion(outputs, "1", 7)


def test_a_count_is_unknown_from_a_server_that_does_not_report_it() -> None:
    assert read_completion({**OUTPUTS, "num_cached_tokens": [2]}, "1", 7).num_cached_tokens == 2
    assert read_completion(OUTPUTS, "1", 7).num_cached_tokens is None


def test_an_output_is_decoded_from_tritons_binary_form() -> None:
    assert decode("text_output", "BYTES", b"\x07\x00\x00\x00Z\xc3\xbcrich\0\0\0\0") == ["Zürich", ""]
    assert decode("num_input_tokens", "INT32", b"\xff\xff\xff\xff\1\0\0\0") == [-1, 1]
    assert decode("seed", "UINT64", b"\xff" * 8) == [2**64 - 1]


@pytest.mark.parametrize(
    ("datatype", "content", "message"),
    [
        ("FP64", b"\0" * 8, "is 8 bytes of type FP64, can't be decoded"),
        ("INT32", b"\0", "is 1 bytes of type INT32, can't be decoded"),
        ("BYTES", b"\x02\0\0\0x", "is 5 bytes of type BYTES, can't be decoded"),
        ("BYTES", b"\1\0\0\0\xff", "is 5 bytes of type BYTES, can't be decoded"),
    ],
)
def test_content_that_is_no_tensor_is_the_servers_error(datatype: str, content: bytes, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        decode("text_output", datatype, content)
