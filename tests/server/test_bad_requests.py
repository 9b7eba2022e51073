"""Requests that break the contract, among good ones in the same batch: each learns why, nobody else notices."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from server.crowd import FULL_SET, batches_of, in_one_batch
from server.messages import assert_clean
from server.servers import EMBEDDED, Statistics
from server.wires import BAD, BINARY_WIRES, TENSOR_WIRES, WIRES, Answer, Refusal, Wire, ask, infer_url, post
from tokenizers import Tokenizer
from triton_local.server import LocalTriton

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Bad:
    """An input that is refused, and what the message must say."""

    name: str
    value: object
    said: tuple[str, ...]
    wires: tuple[Wire, ...] = WIRES


def _tokens(prompt: str) -> int:
    return len(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(prompt).ids)


def _prompt_of(tokens: int) -> str:
    """Return a prompt of exactly so many tokens."""
    prompt = " the" * tokens
    while _tokens(prompt) > tokens:
        prompt = prompt.removesuffix(" the")
    assert _tokens(prompt) == tokens
    return prompt


PROMPT = "Be bad"
ROOM = MAX_MODEL_LEN - _tokens(PROMPT)
INT32_MAX = 2**31 - 1

# What JSON can't carry goes over the binary wires; /generate has one row of one value a key.
VALUES = [
    Bad("text_input", "", ("''", "at least one token")),
    Bad("text_input", _prompt_of(MAX_MODEL_LEN), ("512 tokens", "at most 511 tokens")),
    Bad("text_input", "word " * 20_000, ("100000 bytes", "at most 511 tokens")),
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

# Refused by Triton itself, from the config, before the request gets into a batch.
TENSORS = [
    Bad("max_tokens", [4, 4], ("shape", "[-1,1]", "[1,2]"), TENSOR_WIRES),
    Bad("max_tokens", np.array([4], np.int32), ("shape", "[-1,1]", "[1]"), BINARY_WIRES),
    # Triton says that it is the other input whose rows are too few.
    Bad("text_input", [["one"], ["two"]], ("batch size",), TENSOR_WIRES),
    Bad("max_tokens", np.array([[4]], np.int64), ("INT64", "INT32"), BINARY_WIRES),
    Bad("seed", np.array([[4]], np.int64), ("INT64", "UINT64"), BINARY_WIRES),
    Bad("temperature", np.array([[1.0]], np.float64), ("FP64", "FP32"), BINARY_WIRES),
    Bad("text_input", np.array([[7]], np.int32), ("INT32", "BYTES"), BINARY_WIRES),
    Bad("temprature", np.array([[1.0]], np.float32), ("unexpected",), BINARY_WIRES),
]


def _hold(bad: Bad, refusal: list[Answer] | Refusal) -> None:
    """Check one refusal against what is expected of it."""
    assert isinstance(refusal, Refusal), f"{bad.name} = {str(bad.value)[:80]} was answered: {refusal}"
    assert refusal.kind == BAD, refusal
    for said in (bad.name, *bad.said):
        assert said in refusal.message, refusal
    assert_clean(refusal.message)


def _good(index: int) -> dict[str, object]:
    return {**FULL_SET, "text_input": f"Good {index}", "temperature": 1.0, "seed": index}


def test_bad_requests_in_a_batch_leave_the_good_ones_alone(triton: LocalTriton) -> None:
    good = [_good(index) for index in range(8)]
    alone = [ask(triton, **request) for request in good]
    cases = [(bad, wire) for bad in VALUES for wire in bad.wires]
    most_together = 0
    # With the good ones they are two of Triton's largest batches.
    together = 2 * 32 - len(good)
    for start in range(0, len(cases), together):
        chunk = cases[start : start + together]
        statistics = Statistics(triton)
        jobs = [
            partial(wire, triton, {**FULL_SET, "text_input": PROMPT, "max_tokens": 4, bad.name: bad.value})
            for bad, wire in chunk
        ]
        neighbours = [partial(WIRES[index % 4], triton, request) for index, request in enumerate(good)]
        # Good ones in the middle of the bad ones.
        middle = len(jobs) // 2
        results = in_one_batch(triton, jobs[:middle] + neighbours + jobs[middle:])
        texts = results[middle : middle + len(good)]
        assert texts == [[answer] for answer in alone]
        del results[middle : middle + len(good)]
        for (bad, _), refusal in zip(chunk, results, strict=True):
            _hold(bad, refusal)
        most_together = max(most_together, *batches_of(triton, statistics))
    assert most_together >= 16, "the requests were to share batches"


@pytest.mark.parametrize("bad", TENSORS, ids=lambda bad: f"{bad.name}-{bad.said[-1]}")
def test_a_tensor_that_is_not_the_contracts_is_refused(triton: LocalTriton, bad: Bad) -> None:
    for wire in bad.wires:
        _hold(bad, wire(triton, {"text_input": PROMPT, "max_tokens": 4, bad.name: bad.value}))


def test_a_missing_prompt_is_refused(triton: LocalTriton) -> None:
    for wire in WIRES:
        _hold(Bad("text_input", None, ("missing",)), wire(triton, {"max_tokens": 4}))


def test_an_unknown_input_is_refused_by_its_name(triton: LocalTriton) -> None:
    """A misspelled input of /generate becomes a request parameter; so does one that is put there on purpose."""
    url = f"http://{triton.http_url}/v2/models/llama/generate"
    status, body = post(url, json.dumps({"text_input": "Hello", "temprature": 0.5}).encode())
    assert status == 400
    assert "temprature" in json.loads(body)["error"]
    text = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["Hello"]}
    status, body = post(infer_url(triton), json.dumps({"inputs": [text], "parameters": {"top_q": 1}}).encode())
    assert status == 400
    assert "top_q" in json.loads(body)["error"]


def test_an_error_in_a_request_of_several_rows_names_the_row(triton: LocalTriton) -> None:
    rows = {"text_input": [["one"], ["two"], ["three"]], "max_tokens": [[4], [4], [0]]}
    for wire in TENSOR_WIRES:
        refusal = wire(triton, rows)
        assert isinstance(refusal, Refusal)
        assert refusal.kind == BAD
        assert "row 2: max_tokens is 0" in refusal.message


def test_limits_themselves_are_allowed(triton: LocalTriton) -> None:
    longest = ask(triton, text_input=_prompt_of(MAX_MODEL_LEN - 1))
    assert (longest.num_input_tokens, longest.num_output_tokens) == (MAX_MODEL_LEN - 1, 1)
    filled = ask(triton, text_input=_prompt_of(MAX_MODEL_LEN - 8), max_tokens=8, min_tokens=8)
    assert filled.num_output_tokens == 8
    # The default for max_tokens is capped to what fits.
    assert ask(triton, text_input=_prompt_of(MAX_MODEL_LEN - 8)).num_output_tokens <= 8
    edges = {"temperature": 2.0, "top_p": 1.0, "frequency_penalty": -2.0, "presence_penalty": 2.0}
    assert ask(triton, text_input="x", max_tokens=1, seed=2**64 - 1, top_k=INT32_MAX, **edges).num_output_tokens == 1
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    ends = {"temperature": tiny, "top_p": tiny, "repetition_penalty": float(np.finfo(np.float32).max)}
    for words in ("stop_words", "bad_words"):
        assert (
            ask(triton, text_input="x", max_tokens=2, min_tokens=2, **ends, **{words: ["?!"] * 16}).num_output_tokens
            == 2
        )
