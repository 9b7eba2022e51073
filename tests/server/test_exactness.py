"""In FP32, greedy, the server says what transformers' own generate() says, whoever shares the batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from server.crowd import FULL_SET, batches_of, in_one_batch
from server.servers import EMBEDDED, Statistics
from server.wires import WIRES, ask
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM
from triton_local.server import LocalTriton

PROMPTS = {
    "Return a list of the": 24,
    "The class": 5,
    "Raise an exception if the argument is not a string, and": 16,
    "x": 31,
    "This module provides access to some variables used or maintained by the interpreter and to functions that": 9,
    "def open(": 20,
    "Iterators 🐍 are": 12,
    "If the second argument, which may be omitted, is given,": 1,
}


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What generate() makes of each prompt alone."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model = LlamaForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    # The checkpoint's own config would sample; what isn't given here is off.
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=3)
    texts = []
    for prompt, limit in PROMPTS.items():
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = model.generate(tokens, do_sample=False, max_new_tokens=limit)  # type: ignore[misc]  # its self is odd
        new = output[0, tokens.shape[1] :]
        texts.append(str(tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)))
    return texts


def test_greedy_text_in_fp32_is_that_of_generate(fp32: LocalTriton, expected: list[str]) -> None:
    statistics = Statistics(fp32)
    requests = [{**FULL_SET, "text_input": prompt, "max_tokens": limit} for prompt, limit in PROMPTS.items()]
    jobs = [partial(ask, fp32, WIRES[index % 4], **request) for index, request in enumerate(requests)]
    answers = in_one_batch(fp32, jobs)
    assert max(batches_of(fp32, statistics)) >= 4, "the prompts were to share batches"
    assert [answer.text for answer in answers] == expected
