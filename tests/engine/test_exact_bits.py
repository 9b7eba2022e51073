"""In INT8, tokens and logits of a sequence are the same bits alone, in any mix and cut of prompts.

`exact_bits` has the slots and chunk sizes, and compares.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import load
from engine.exact_bits import Bits
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


@pytest.mark.parametrize("mixes", [20, pytest.param(100, marks=long)])
def test_they_are_the_same_bits_with_the_instructions_of_an_older_processor(mixes: int, note: Note) -> None:
    needs_compiled_kernels("avx2")
    compared = subprocess.run(
        [sys.executable, "-m", "engine.exact_bits", "--mixes", str(mixes)],
        env=os.environ | CAPPED | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert compared.returncode == 0, compared.stderr
    assert "by compiled AVX2 kernels" in compared.stdout
    _assert_compared(compared.stdout.strip(), mixes, note)
