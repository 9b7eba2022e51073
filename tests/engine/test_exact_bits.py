"""In INT8, tokens and logits of a sequence are the same bits alone, in any mix and cut of prompts, on every CPU path.

`exact_bits` has the slots and chunk sizes, and compares.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import load
from engine.exact_bits import Bits
from llama_engine.model.model_runner import PromptChunk
from llama_engine.model.torch_runner import ATTENTION_BLOCK
from notes import Note

CAPPED = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}

long = pytest.mark.long


def _assert_compared(described: str, mixes: int, note: Note) -> None:
    note(described)
    figures = re.search(r"(\d+) mixes, (\d+) rows, (\d+) cancelled", described)
    assert figures is not None
    compared, rows, cancelled = map(int, figures.groups())
    assert compared == mixes
    assert rows > 15 * mixes
    assert cancelled > mixes / 20


def _assert_same_bits(bits: Bits, note: Note) -> None:
    assert bits.different == []
    _assert_compared(bits.describe(), bits.mixes, note)


@pytest.mark.parametrize(
    ("cache", "terms", "mixes"),
    [
        ("auto", "auto", 10),
        ("float32", "auto", 10),
        ("int8", "auto", 10),
        ("auto", "1", 5),
        ("auto", "2", 5),
        pytest.param("auto", "auto", 400, marks=long),
        pytest.param("int8", "2", 150, marks=long),
    ],
)
def test_tokens_have_the_same_bits_in_any_mix(cache: str, terms: str, mixes: int, note: Note) -> None:
    needs_compiled_kernels()
    checkpoint = replace(load("int8", kv_cache_dtype=cache, int8_terms=terms), max_model_len=128)
    words = {"auto": "two terms for outlier rows", "1": "one term,", "2": "two terms,"}[terms]
    assert words in checkpoint.info.product
    _assert_same_bits(Bits(checkpoint, mixes, kv_cache_dtype=cache), note)


@pytest.mark.parametrize(
    ("cache", "terms", "mixes"),
    [
        ("int8", "auto", 5),
        pytest.param("bfloat16", "2", 5, marks=long),
        pytest.param("auto", "auto", 20, marks=long),
        pytest.param("int8", "1", 10, marks=long),
    ],
)
def test_without_compiled_kernels_they_are_the_same_bits_in_any_mix(
    cache: str, terms: str, mixes: int, note: Note
) -> None:
    # The last of the blocks in which a prompt attends is shorter than the others.
    checkpoint = replace(
        load("int8", kernels="stock", int8_terms=terms, kv_cache_dtype=cache), max_model_len=ATTENTION_BLOCK + 48
    )
    _assert_same_bits(Bits(checkpoint, mixes, kv_cache_dtype=cache), note)


def test_output_computed_again_has_the_bits_of_decode_steps() -> None:
    checkpoint = load("int8", kernels="stock")
    shape = checkpoint.cache_shape(2)
    runner, prompt, output = checkpoint.runner(shape), range(50, 90), range(90, 115)
    for slot in (0, 1):
        runner.set_pages(slot, 0, range(1 + slot, shape.pages, 2))
    with torch.inference_mode():
        runner.prefill([PromptChunk(0, 0, prompt)])
        steps = [
            runner.decode(torch.tensor([0]), torch.tensor([token]), torch.tensor([position]), position + 1)
            for position, token in enumerate(output, len(prompt))
        ]
        again = runner.prefill([PromptChunk(1, 0, [*prompt, *output], generated=len(output))], every=True)
    assert torch.equal(again[len(prompt) :], torch.cat(steps))


@pytest.mark.parametrize(
    ("arguments", "product", "mixes"),
    [
        ((), "by compiled AVX2 kernels", 20),
        pytest.param((), "by compiled AVX2 kernels", 100, marks=long),
        pytest.param(("--kernels=stock",), "oneDNN with 7-bit terms", 10, marks=long),
    ],
    ids=["compiled", "compiled, many", "stock"],
)
def test_they_are_the_same_bits_with_the_instructions_of_an_older_processor(
    arguments: tuple[str, ...], product: str, mixes: int, note: Note
) -> None:
    if "compiled" in product:
        needs_compiled_kernels("avx2")
    compared = subprocess.run(
        [sys.executable, "-m", "engine.exact_bits", "--mixes", str(mixes), *arguments],
        env=os.environ | CAPPED | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert compared.returncode == 0, compared.stderr
    assert product in compared.stdout
    _assert_compared(compared.stdout.strip(), mixes, note)
