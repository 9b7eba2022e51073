"""What the client sends and reads: names, types and shapes of the contract, and what can't be sent at all."""

from __future__ import annotations

import numpy as np
import pytest
from triton_llama import RejectedInputError, SamplingParams, ServerError
from triton_llama.tensors import Array, Tensor, prepare, read_completion

FULL_SET = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "repetition_penalty": "FP32",
    "frequency_penalty": "FP32",
    "presence_penalty": "FP32",
    "seed": "UINT64",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "exclude_input_in_output": "BOOL",
}


def tensors(prompt: str = "def", **sampling: object) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in prepare(prompt, SamplingParams(**sampling)).tensors}  # type: ignore[arg-type]


def test_every_request_carries_the_full_set_or_batches_do_not_form() -> None:
    sent = tensors()
    assert {name: tensor.datatype for name, tensor in sent.items()} == FULL_SET
    assert all(tensor.values.shape == (1, 1) for tensor in sent.values())


def test_defaults_are_the_documented_ones() -> None:
    sent = {name: tensor.values.tolist()[0] for name, tensor in tensors().items() if name != "seed"}
    assert sent == {
        "text_input": [b"def"],
        "max_tokens": [128],
        "min_tokens": [0],
        "temperature": [0.0],
        "top_k": [0],
        "top_p": [1.0],
        "repetition_penalty": [1.0],
        "frequency_penalty": [0.0],
        "presence_penalty": [0.0],
        "stop_words": [b""],
        "bad_words": [b""],
        "exclude_input_in_output": [True],
    }


def test_element_types_fit_the_wire_types() -> None:
    kinds = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_, "BYTES": np.object_}
    for tensor in tensors().values():
        assert tensor.values.dtype == kinds[tensor.datatype], tensor.name


def test_none_leaves_an_input_out_and_only_that_one() -> None:
    assert tensors(top_p=None).keys() == FULL_SET.keys() - {"top_p"}


def test_from_checkpoint_sends_the_prompt_and_a_seed_alone() -> None:
    sent = prepare("def", SamplingParams.from_checkpoint()).tensors
    assert [tensor.name for tensor in sent] == ["text_input", "seed"]


def test_a_drawn_seed_is_reported_and_differs_between_requests() -> None:
    first, second = prepare("def", SamplingParams()), prepare("def", SamplingParams())
    assert first.seed != second.seed
    assert first.request_id != second.request_id
    assert next(tensor for tensor in first.tensors if tensor.name == "seed").values[0, 0] == first.seed


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_a_given_seed_travels_unchanged(seed: int) -> None:
    assert tensors(seed=seed)["seed"].values[0, 0] == seed


def test_words_are_one_row_however_many() -> None:
    sent = tensors(stop_words=["\n\n", "é"], bad_words=("x",))
    assert sent["stop_words"].values.tolist() == [[b"\n\n", "é".encode()]]
    assert sent["bad_words"].values.tolist() == [[b"x"]]


def test_nul_and_four_byte_characters_survive() -> None:
    assert tensors("a\0\U0001f40d\0")["text_input"].values[0, 0] == "a\0\U0001f40d\0".encode()


def test_values_out_of_the_servers_bounds_are_left_to_the_server() -> None:
    sent = tensors("", max_tokens=-5, temperature=float("nan"), top_p=7, seed=3)
    assert sent["max_tokens"].values[0, 0] == -5
    assert np.isnan(sent["temperature"].values[0, 0])


def test_numpy_numbers_are_numbers() -> None:
    sent = tensors(max_tokens=np.int64(5), temperature=np.float64(0.5), seed=np.uint64(2**64 - 1))
    assert sent["max_tokens"].values[0, 0] == 5
    assert sent["seed"].values[0, 0] == 2**64 - 1


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 2**31}, "max_tokens is 2147483648, must lie in -2147483648 ... 2147483647"),
        ({"max_tokens": 3.0}, "max_tokens is 3.0, must be an integer"),
        ({"top_k": True}, "top_k is True, must be an integer"),
        ({"seed": -1}, "seed is -1, must lie in 0 ... 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616, must lie in 0 ... 18446744073709551615"),
        ({"temperature": "0.5"}, "temperature is '0.5', must be a number"),
        ({"temperature": 1e39}, "temperature is 1e+39, must lie in -3.40282e+38 ... 3.40282e+38 (32-bit float)"),
        ({"temperature": 10**400}, "temperature is an integer too large for a 32-bit float"),
        ({"top_p": False}, "top_p is False, must be a number"),
        ({"stop_words": "end"}, "stop_words is 'end', must be a list of strings"),
        ({"stop_words": ["end", 3]}, "stop_words is 3, must be a string"),
        ({"bad_words": [b"x"]}, "bad_words is b'x', must be a string"),
        ({"exclude_input_in_output": 1}, "exclude_input_in_output is 1, must be True or False"),
    ],
)
def test_what_no_tensor_can_hold_is_refused_by_name_value_and_bound(sampling: dict[str, object], message: str) -> None:
    with pytest.raises(RejectedInputError) as refusal:
        tensors(**sampling)  # type: ignore[arg-type]
    assert str(refusal.value) == message


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(RejectedInputError, match=r"text_input has '\\ud800' at character 2, must be text that UTF-8"):
        tensors("ab\ud800")


def test_an_unknown_keyword_is_an_error_and_not_ignored() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams().with_options(temprature=0.5)  # type: ignore[call-arg]


class Answer:
    """An answer's tensors, by name."""

    def __init__(self, **outputs: Array) -> None:
        self.outputs = outputs

    def as_numpy(self, name: str) -> Array | None:
        return self.outputs.get(name)


def good_outputs() -> dict[str, Array]:
    return {
        "text_output": np.array([["Zürich".encode()]], dtype=np.object_),
        "finish_reason": np.array([[b"stop"]], dtype=np.object_),
        "num_input_tokens": np.array([[3]], dtype=np.int32),
        "num_output_tokens": np.array([[5]], dtype=np.int32),
    }


def test_an_answer_becomes_a_completion() -> None:
    request = prepare("def", SamplingParams(seed=7))
    completion = read_completion(Answer(**good_outputs()), request)
    assert (completion.text, completion.finish_reason) == ("Zürich", "stop")
    assert (completion.num_input_tokens, completion.num_output_tokens) == (3, 5)
    assert (completion.seed, completion.request_id) == (7, request.request_id)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("finish_reason", None, "lacks the output finish_reason"),
        ("num_input_tokens", np.array([[3, 4]], dtype=np.int32), "num_input_tokens has shape [1, 2], must be [1, 1]"),
        ("num_output_tokens", np.array([["x"]], dtype=np.object_), "num_output_tokens is of type str"),
        ("text_output", np.array([[b"\xff"]], dtype=np.object_), "text_output is not UTF-8 at byte 0"),
        ("text_output", np.array([[1]], dtype=np.int32), "text_output is of type int32, must be a string"),
    ],
)
def test_an_answer_outside_the_contract_is_the_servers_error(name: str, value: Array | None, message: str) -> None:
    outputs = {key: array for key, array in good_outputs().items() if key != name}
    if value is not None:
        outputs[name] = value
    with pytest.raises(ServerError) as error:
        read_completion(Answer(**outputs), prepare("def", SamplingParams()))
    assert message in str(error.value)
