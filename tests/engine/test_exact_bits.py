"""Promise 3 in INT8: tokens and logits of a sequence are the same bits alone and in any mix, on every hardware path."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from engine.engines import load
from engine.exact_bits import BUDGETS, Bits, compare
from llama_engine.model.loader import Checkpoint
from notes import Note

CAPPED = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def _assert_same(checkpoint: Checkpoint, bits: Bits, note: Note) -> None:
    note(f"{checkpoint.info.product}: {bits.mixes} mixes, {bits.rows} rows, {bits.cancelled} cancelled")
    assert bits.different == []
    assert bits.rows > 15 * bits.mixes
    assert bits.cancelled > bits.mixes / 20


@pytest.mark.parametrize("mixes", [40, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("cache", ["auto", "float32", "int8"])
def test_logits_and_tokens_are_the_same_bits_alone_and_in_any_mix(cache: str, mixes: int, note: Note) -> None:
    checkpoint = replace(load("int8", kv_cache_dtype=cache), max_model_len=128)
    _assert_same(checkpoint, compare(Bits(checkpoint, kv_cache_dtype=cache), mixes), note)


@pytest.mark.parametrize("mixes", [10, pytest.param(500, marks=pytest.mark.long)])
def test_without_compiled_kernels_they_are_the_same_bits_in_any_mix_of_whole_prompts(mixes: int, note: Note) -> None:
    checkpoint = replace(load("int8", kernels="stock"), max_model_len=128)
    _assert_same(checkpoint, compare(Bits(checkpoint, BUDGETS[-1:]), mixes), note)


def test_without_compiled_kernels_a_cut_of_the_prompt_changes_logits_by_roundings_only(note: Note) -> None:
    checkpoint = replace(load("int8", kernels="stock"), max_model_len=128)
    bits = compare(Bits(checkpoint, tolerance=5e-4), 8)
    note(f"{checkpoint.info.product}, cut prompts: {bits.rows} rows within {bits.tolerance:g}")
    assert bits.different == []


@pytest.mark.parametrize("mixes", [20, pytest.param(2000, marks=pytest.mark.long)])
def test_they_are_the_same_bits_with_the_instructions_of_an_older_processor(mixes: int, note: Note) -> None:
    compared = subprocess.run(
        [sys.executable, "-m", "engine.exact_bits", "--mixes", str(mixes)],
        env=os.environ | CAPPED | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    note(compared.stdout.strip())
    assert compared.returncode == 0, compared.stderr
    assert "AVX2" in compared.stdout.upper()
