"""Triton's batches: each config forms its own, and every request of a batch gets the text that it gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from server.batches import FULL_SET, in_one_batch
from server.clients import WIRES, ask
from server.fleet import Fleet
from server.servers import EMBEDDED, Statistics, facts, get_json
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM
from triton_local.server import LocalTriton

MAX_BATCH_SIZE = {"triton": 32, "batched_int8": 8, "batched_fp16": 8, "naive_fp16": 1}
PREFERRED = {"triton": [4, 8, 16, 32], "batched_int8": [4, 8], "batched_fp16": [4, 8]}
INT8 = ("triton", "batched_int8")

PROMPTS = (
    "Return a list of the", "The class", "Raise", "This module provides", "An exception", "def", "None", "x", "for",
    "If the argument is not given, then", "Open the file and read its lines, one by one, until", "Iterators",
    "When an instance of a class is created, its method", "A string is", "Note that",
    "The default value of the second argument, which may be omitted, is",
)  # fmt: skip
GREEDY = {
    "Return a list of the": 24,
    "The class": 5,
    "Raise an exception if the argument is not a string, and": 16,
    "x": 31,
    "This module provides access to some variables used or maintained by the interpreter and to functions that": 9,
    "def open(": 20,
    "Iterators 🐍 are": 12,
    "If the second argument, which may be omitted, is given,": 1,
}
"""Prompts, and how many tokens to generate."""


@pytest.fixture(params=list(MAX_BATCH_SIZE), scope="module")
def config(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def configured(config: str, fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[LocalTriton]:
    if config == "triton":
        yield request.getfixturevalue("triton")
    else:
        with fleet.server(config) as own:
            yield own


def test_the_live_config_is_the_one_that_was_named(configured: LocalTriton, config: str) -> None:
    live: dict[str, Any] = get_json(configured, "/v2/models/llama/config")
    assert live["max_batch_size"] == MAX_BATCH_SIZE[config]
    assert ("dynamic_batching" in live) == (config in PREFERRED)
    if config in PREFERRED:
        assert live["dynamic_batching"]["preferred_batch_size"] == PREFERRED[config]
        assert int(live["dynamic_batching"]["max_queue_delay_microseconds"]) == 10_000
    assert live["parameters"]["quantization"]["string_value"] == ("int8" if config in INT8 else "none")
    assert not live.get("model_transaction_policy", {}).get("decoupled", False)
    # Read back from the model: seven linear layers in each of six blocks; the head stays unquantized.
    loaded = "1 in float32, 42 in int8" if config in INT8 else "43 in float16"
    assert f"linear layers {loaded}" in facts(configured)


def test_every_endpoint_gives_the_same_answer_within_the_configs_batch_size(
    configured: LocalTriton, config: str
) -> None:
    statistics = Statistics(configured)
    request = {**FULL_SET, "text_input": "Return a list of the", "max_tokens": 6, "min_tokens": 6, "seed": 3}
    answers, _ = in_one_batch(configured, [partial(ask, configured, wire, **request) for wire in WIRES])
    assert [answer.num_output_tokens for answer in answers] == [6] * 4
    assert answers == [answers[0]] * 4
    assert max(statistics.batches()) <= MAX_BATCH_SIZE[config]


def _request(index: int) -> dict[str, object]:
    """Return a request that differs from the fifteen others in everything."""
    return {
        **FULL_SET,
        "text_input": PROMPTS[index],
        "max_tokens": 4 + 2 * index,
        "min_tokens": index,
        "temperature": (0.0, 0.7, 1.3, 2.0)[index % 4],
        "top_k": (0, 50, 7)[index % 3],
        "top_p": (1.0, 0.9)[index % 2],
        "repetition_penalty": (1.0, 1.3, 0.9)[index % 3],
        "frequency_penalty": (0.0, 0.5, -0.5, 0.0, 1.0)[index % 5],
        "presence_penalty": (0.0, 0.3)[index % 2],
        "seed": 1000 + index,
        "stop_words": [[""], ["\n"], ["e", "qqq"]][index % 3],
        "bad_words": [[""], ["the", "a"]][index % 2],
        "exclude_input_in_output": index % 4 != 1,
    }


def test_requests_with_different_parameters_share_a_batch_and_get_the_text_they_get_alone(triton: LocalTriton) -> None:
    requests = [_request(index) for index in range(len(PROMPTS))]
    alone = [ask(triton, **request) for request in requests]
    jobs = [partial(ask, triton, WIRES[index % 4], **request) for index, request in enumerate(requests)]
    together, batches = in_one_batch(triton, jobs)
    assert together == alone
    assert max(batches) >= 8, batches
    assert sum(size * count for size, count in batches.items()) == 16


def test_stop_words_of_different_counts_do_not_split_a_batch(triton: LocalTriton) -> None:
    requests = [
        {**FULL_SET, "text_input": "Return", "max_tokens": 4, "stop_words": ["?!"] * count, "bad_words": ["?!"] * count}
        for count in range(1, 17)
    ]
    _, batches = in_one_batch(triton, [partial(ask, triton, **request) for request in requests])
    assert max(batches) >= 8, batches


@pytest.fixture(scope="module")
def generated() -> list[str]:
    """What transformers' generate() returns for each prompt of GREEDY alone."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model = LlamaForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    # The checkpoint's own config samples; what is left out here is off.
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=3)
    texts = []
    for prompt, limit in GREEDY.items():
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = model.generate(tokens, do_sample=False, max_new_tokens=limit)  # type: ignore[misc]  # its self is odd
        new = output[0, tokens.shape[1] :]
        texts.append(str(tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)))
    return texts


def test_greedy_fp32_text_in_a_batch_equals_that_of_generate(fp32: LocalTriton, generated: list[str]) -> None:
    requests = [{**FULL_SET, "text_input": prompt, "max_tokens": limit} for prompt, limit in GREEDY.items()]
    jobs = [partial(ask, fp32, WIRES[index % 4], **request) for index, request in enumerate(requests)]
    answers, batches = in_one_batch(fp32, jobs)
    assert "linear layers 43 in float32" in facts(fp32)
    assert max(batches) >= 4, batches
    assert [answer.text for answer in answers] == generated
