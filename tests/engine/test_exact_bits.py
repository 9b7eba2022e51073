"""In INT8, tokens and logits of a sequence are the same bits alone, in any mix and cut of prompts.

`exact_bits` has the slots and chunk sizes, and compares.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import load
from engine.exact_bits import Bits
from notes import Note

long = pytest.mark.long
TERMS = {"auto": "two terms for outlier rows", "1": "one term,", "2": "two terms,"}


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
    assert TERMS[terms] in checkpoint.info.product
    bits = Bits(checkpoint, mixes, kv_cache_dtype=cache)
    note(bits.describe())
    assert bits.different == []
    assert bits.rows > 15 * mixes
    assert bits.events["cancelled"] > mixes / 20
