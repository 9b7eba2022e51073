"""Requests outside the contract: the error names input, value and bound, and other requests are not affected."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from server.batches import FULL_SET, in_one_batch
from server.clients import (
    BAD,
    BINARY_WIRES,
    TENSOR_WIRES,
    WIRES,
    Answer,
    Refusal,
    Wire,
    ask,
    assert_clean,
    at_once,
    generate_url,
    infer_url,
    post,
)  # fmt: skip
from server.servers import EMBEDDED, get_json
from server.streams import STREAM_WIRES
from tokenizers import Tokenizer
from triton_local.server import LocalTriton

MAX_MODEL_LEN = 512
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Bad:
    """An input that is refused, and what the message contains besides its name."""

    name: str
    value: object
    contains: tuple[str, ...]
    wires: tuple[Wire, ...] = WIRES

    def check(self, refusal: list[Answer] | Refusal) -> None:
        assert isinstance(refusal, Refusal), f"{self.name} = {str(self.value)[:80]} was answered: {refusal}"
        assert refusal.kind == BAD, refusal
        for part in (self.name, *self.contains):
            assert part in refusal.message, refusal
        assert_clean(refusal.message)


def _tokens(prompt: str) -> int:
    return len(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(prompt).ids)


def _prompt_of(tokens: int) -> str:
    prompt = " the" * tokens
    while _tokens(prompt) > tokens:
        prompt = prompt.removesuffix(" the")
    assert _tokens(prompt) == tokens
    return prompt


PROMPT = "Be bad"
ROOM = MAX_MODEL_LEN - _tokens(PROMPT)

# JSON can't carry every value; /generate has one row of one value a key.
VALUES = [
    Bad("text_input", "", ("''", "at least one token")),
    Bad("text_input", _prompt_of(MAX_MODEL_LEN), ("512 tokens", "at most 511 tokens")),
    Bad("text_input", "word " * 200_000, ("1000000 bytes", "at most 511 tokens")),
    Bad("text_input", b"caf\xe9", ("UTF-8", "0xe9", "offset 3"), BINARY_WIRES),
    Bad("stop_words", [b"ok", b"\xff\xfe"], ("UTF-8", "0xff", "offset 0"), BINARY_WIRES),
    Bad("bad_words", [b"\x80"], ("UTF-8", "0x80", "offset 0"), BINARY_WIRES),
    Bad("max_tokens", 0, ("is 0", "at least 1")),
    Bad("max_tokens", -(2**31), ("is -2147483648", "at least 1")),
    Bad("max_tokens", MAX_MODEL_LEN, ("is 512", f"at most {ROOM}", f"{_tokens(PROMPT)} tokens", "512")),
    Bad("max_tokens", INT32_MAX, (f"is {INT32_MAX}", f"at most {ROOM}")),
    Bad("min_tokens", -1, ("is -1", "at least 0", "at most 4")),
    Bad("min_tokens", 5, ("is 5", "at least 0", "at most 4")),
    Bad("temperature", -0.5, ("is -0.5", "at least 0", "at most 2")),
    Bad("temperature", 2.5, ("is 2.5", "at least 0", "at most 2")),
    Bad("top_k", -1, ("is -1", "at least 0")),
    Bad("top_p", 0.0, ("is 0.0", "greater than 0", "at most 1")),
    Bad("top_p", -0.5, ("is -0.5", "greater than 0", "at most 1")),
    Bad("top_p", 1.5, ("is 1.5", "greater than 0", "at most 1")),
    Bad("repetition_penalty", 0.0, ("is 0.0", "greater than 0")),
    Bad("repetition_penalty", -1.0, ("is -1.0", "greater than 0")),
    Bad("stop_words", ["x"] * 17, ("17 words", "at most 16")),
    Bad("stop_words", ["e" * 1_000_000], ("1000000 bytes",)),
    Bad("bad_words", ["x"] * 65, ("65 words", "at most 64")),
    Bad("bad_words", ["x", "x" * 1025], ("1025 bytes", "at most 1024")),
    *(
        Bad(name, value, (f"is {value}", "at least -2", "at most 2"))
        for name in ("frequency_penalty", "presence_penalty")
        for value in (-2.5, 2.5)
    ),
    *(
        Bad(name, value, (f"is {value}", "finite"), BINARY_WIRES)
        for name in ("temperature", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
        for value in (float("nan"), float("inf"), float("-inf"))
    ),
]

# Triton itself refuses these from the config, before they reach a batch.
TENSORS = [
    Bad("max_tokens", [4, 4], ("shape", "[-1,1]", "[1,2]"), TENSOR_WIRES),
    Bad("max_tokens", np.array([4], np.int32), ("shape", "[-1,1]", "[1]"), BINARY_WIRES),
    # Triton names the other input, whose rows are fewer.
    Bad("text_input", [["one"], ["two"]], ("batch size",), TENSOR_WIRES),
    Bad("max_tokens", np.array([[4]], np.int64), ("INT64", "INT32"), BINARY_WIRES),
    Bad("seed", np.array([[4]], np.int64), ("INT64", "UINT64"), BINARY_WIRES),
    Bad("temperature", np.array([[1.0]], np.float64), ("FP64", "FP32"), BINARY_WIRES),
    Bad("text_input", np.array([[7]], np.int32), ("INT32", "BYTES"), BINARY_WIRES),
    Bad("temprature", np.array([[1.0]], np.float32), ("unexpected",), BINARY_WIRES),
]


def test_bad_requests_in_a_batch_are_refused_and_good_ones_answered(triton: LocalTriton) -> None:
    good = [{**FULL_SET, "text_input": f"Good {index}", "temperature": 1.0, "seed": index} for index in range(8)]
    alone = [ask(triton, **request) for request in good]
    cases = [(bad, wire) for bad in VALUES for wire in bad.wires]
    largest = 0
    # With the good ones they fill two of Triton's largest batches.
    together = 2 * 32 - len(good)
    for start in range(0, len(cases), together):
        chunk = cases[start : start + together]
        jobs = [
            partial(wire, triton, {**FULL_SET, "text_input": PROMPT, "max_tokens": 4, bad.name: bad.value})
            for bad, wire in chunk
        ]
        neighbours = [partial(WIRES[index % 4], triton, request) for index, request in enumerate(good)]
        middle = len(jobs) // 2
        results, batches = in_one_batch(triton, jobs[:middle] + neighbours + jobs[middle:])
        assert results[middle : middle + len(good)] == [[answer] for answer in alone]
        del results[middle : middle + len(good)]
        for (bad, _), refusal in zip(chunk, results, strict=True):
            bad.check(refusal)
        largest = max(largest, *batches)
    assert largest >= 16, "the requests were to share batches"


@pytest.mark.parametrize("bad", TENSORS, ids=lambda bad: f"{bad.name}-{bad.contains[-1]}")
def test_a_tensor_of_another_shape_or_type_is_refused(triton: LocalTriton, bad: Bad) -> None:
    for wire in bad.wires:
        bad.check(wire(triton, {"text_input": PROMPT, "max_tokens": 4, bad.name: bad.value}))


def test_a_missing_prompt_is_refused(triton: LocalTriton) -> None:
    for wire in WIRES:
        Bad("text_input", None, ("missing",)).check(wire(triton, {"max_tokens": 4}))


def test_streaming_is_refused_under_a_config_with_one_response(triton: LocalTriton) -> None:
    for wire in WIRES:
        Bad("stream", True, ("stream is true; it must be false",)).check(
            wire(triton, {**FULL_SET, "text_input": "x", "stream": True})
        )
    for stream_wire in STREAM_WIRES:
        error = stream_wire(triton, {**FULL_SET, "text_input": "x"}).error
        assert error is not None
        assert "stream is true; it must be false" in error
        assert not stream_wire(triton, {**FULL_SET, "text_input": "x", "stream": False}).error


def test_an_unknown_input_is_refused_by_name(triton: LocalTriton) -> None:
    """An unknown key of /generate becomes a request parameter; /infer has parameters of its own."""
    text = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["Hello"]}
    for url, body, name in (
        (generate_url(triton), {"text_input": "Hello", "temprature": 0.5}, "temprature"),
        (infer_url(triton), {"inputs": [text], "parameters": {"top_q": 1}}, "top_q"),
    ):
        status, answer = post(url, json.dumps(body).encode())
        assert status == 400
        assert name in json.loads(answer)["error"]


def test_an_error_in_a_request_of_several_rows_names_the_row(triton: LocalTriton) -> None:
    rows = {"text_input": [["one"], ["two"], ["three"]], "max_tokens": [[4], [4], [0]]}
    for wire in TENSOR_WIRES:
        Bad("row 2", None, ("max_tokens is 0",)).check(wire(triton, rows))


def test_a_request_has_at_most_thirty_two_rows(triton: LocalTriton) -> None:
    inputs: dict[str, list[list[object]]] = {
        "text_input": [["Return"]] * 33,
        "max_tokens": [[1]] * 33,
        "min_tokens": [[1]] * 33,
    }
    for wire in TENSOR_WIRES:
        Bad("batch-size", 33, ("must be <= 32",)).check(wire(triton, inputs))
    most: dict[str, object] = {name: value[:-1] for name, value in inputs.items()}
    for answers in at_once([partial(wire, triton, most) for wire in TENSOR_WIRES]):
        assert not isinstance(answers, Refusal)
        assert [answer.num_output_tokens for answer in answers] == [1] * 32


def test_the_queue_is_bounded_in_length_and_time(either: LocalTriton) -> None:
    policy = get_json(either, "/v2/models/llama/config")["dynamic_batching"]["default_queue_policy"]
    assert int(policy["default_timeout_microseconds"]) == 600_000_000
    assert (policy["timeout_action"], policy["allow_timeout_override"], policy["max_queue_size"]) == (
        "REJECT",
        True,
        256,
    )


def test_values_at_the_bounds_are_accepted(triton: LocalTriton) -> None:
    longest = ask(triton, text_input=_prompt_of(MAX_MODEL_LEN - 1))
    assert (longest.num_input_tokens, longest.num_output_tokens) == (MAX_MODEL_LEN - 1, 1)
    filled = ask(triton, text_input=_prompt_of(MAX_MODEL_LEN - 8), max_tokens=8, min_tokens=8)
    assert filled.num_output_tokens == 8
    # The default of max_tokens is capped to the positions left.
    assert ask(triton, text_input=_prompt_of(MAX_MODEL_LEN - 8)).num_output_tokens <= 8
    edges = {"temperature": 2.0, "top_p": 1.0, "frequency_penalty": -2.0, "presence_penalty": 2.0}
    assert ask(triton, text_input="x", max_tokens=1, seed=2**64 - 1, top_k=INT32_MAX, **edges).num_output_tokens == 1
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    ends = {"temperature": tiny, "top_p": tiny, "repetition_penalty": float(np.finfo(np.float32).max)}
    for name in ("stop_words", "bad_words"):
        answer = ask(triton, text_input="x", max_tokens=2, min_tokens=2, **ends, **{name: ["?!"] * 16})
        assert answer.num_output_tokens == 2


@pytest.mark.parametrize(("name", "most"), [("stop_words", 16), ("bad_words", 64)])
def test_the_longest_lists_of_words_that_never_match_change_nothing(triton: LocalTriton, name: str, most: int) -> None:
    request = {**FULL_SET, "text_input": "eeee", "seed": 4, "temperature": 1.0}
    words = ["e" * (1024 - index) for index in range(most)]
    assert ask(triton, **request | {name: words}) == ask(triton, **request)
