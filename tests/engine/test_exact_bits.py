"""In INT8, tokens and logits of a sequence are the same bits alone, in any mix and cut of prompts, with any adapters.

`exact_bits` has the slots and chunk sizes, and compares.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import EMBEDDED, load
from engine.exact_bits import EVENTS, Bits
from notes import Note

from models.quantized_checkpoints import write

long = pytest.mark.long
TERMS = {"auto": "two terms for outliers", "1": "one term,", "2": "two terms,"}


@pytest.mark.parametrize(
    ("cache", "terms", "mixes", "instructions", "options"),
    [
        ("auto", "auto", 10, None, set()),
        ("float32", "auto", 5, None, set()),
        ("int8", "auto", 5, None, set()),
        ("auto", "1", 5, None, set()),
        ("auto", "2", 5, None, set()),
        ("auto", "auto", 10, "AVX2", set()),
        ("auto", "auto", 10, None, {"drafts"}),
        ("int8", "2", 5, "AVX2", {"drafts"}),
        ("auto", "auto", 10, None, {"drafts", "adapters"}),
        pytest.param("auto", "auto", 400, None, set(), marks=long),
        pytest.param("int8", "2", 150, None, set(), marks=long),
        pytest.param("auto", "auto", 100, "AVX2", set(), marks=long),
        pytest.param("auto", "auto", 300, None, {"drafts"}, marks=long),
        pytest.param("auto", "auto", 100, "AVX2", {"drafts"}, marks=long),
        pytest.param("auto", "auto", 400, None, {"drafts", "adapters"}, marks=long),
        pytest.param("int8", "1", 100, "AVX2", {"adapters"}, marks=long),
    ],
)
def test_tokens_have_the_same_bits_in_any_mix(
    cache: str,
    terms: str,
    mixes: int,
    instructions: str | None,
    options: set[str],
    note: Note,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_compiled_kernels(instructions and instructions.lower())
    if instructions is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", instructions)
    checkpoint = replace(load("int8", kv_cache_dtype=cache, int8_terms=terms), max_model_len=128)
    assert TERMS[terms] in checkpoint.info.product
    assert f"by compiled {instructions or 'AVX'}" in checkpoint.info.product
    bits = Bits(checkpoint, mixes, kv_cache_dtype=cache, drafts="drafts" in options, adapters="adapters" in options)
    note(bits.describe())
    assert bits.different == []
    assert bits.rows > 15 * mixes
    assert bits.events["cancelled"] > mixes / 20
    assert mixes < 10 or {event for event in EVENTS if bits.events[event]} >= {*EVENTS} - {"guessed", "adapted"}
    assert (bits.events["guessed"] > mixes) == ("drafts" in options)
    assert (bits.events["adapted"] > mixes) == ("adapters" in options)


@pytest.mark.parametrize(
    ("name", "mixes"),
    [("gptq4-act-order", 5), pytest.param("gptq4-act-order", 60, marks=long), pytest.param("w4a16", 60, marks=long)],
)
def test_adapters_on_4_bit_groups_have_the_same_bits_in_any_mix(
    name: str, mixes: int, note: Note, tmp_path: Path
) -> None:
    needs_compiled_kernels()
    checkpoint = replace(load("checkpoint", model=str(write(EMBEDDED, name, tmp_path / name))), max_model_len=128)
    bits = Bits(checkpoint, mixes, drafts=True, adapters=True)
    note(f"{name}: {bits.describe()}")
    assert bits.different == []
    assert bits.events["adapted"] > mixes
