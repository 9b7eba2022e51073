"""Promise 3 in INT8: tokens and logits of a sequence are the same bits alone and in any mix, on every hardware path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from engine.compiled_kernels import needs_compiled_kernels
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


@pytest.mark.parametrize(
    ("cache", "terms", "mixes"),
    [
        ("auto", "2", 40),
        ("float32", "2", 40),
        ("int8", "2", 40),
        ("auto", "1", 40),
        pytest.param("auto", "2", 2000, marks=pytest.mark.long),
        pytest.param("int8", "2", 300, marks=pytest.mark.long),
    ],
)
def test_logits_and_tokens_are_the_same_bits_alone_and_in_any_mix(
    cache: str, terms: str, mixes: int, note: Note
) -> None:
    needs_compiled_kernels()
    checkpoint = replace(load("int8", kv_cache_dtype=cache, int8_terms=terms), max_model_len=128)
    assert ("one term" if terms == "1" else "two terms") in checkpoint.info.product
    _assert_same(checkpoint, compare(Bits(checkpoint, kv_cache_dtype=cache), mixes), note)


@pytest.mark.parametrize("mixes", [10, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("terms", ["2", "1"])
def test_without_compiled_kernels_they_are_the_same_bits_in_any_mix_of_whole_prompts(
    terms: str, mixes: int, note: Note
) -> None:
    checkpoint = replace(load("int8", kernels="stock", int8_terms=terms), max_model_len=128)
    _assert_same(checkpoint, compare(Bits(checkpoint, BUDGETS[-1:]), mixes), note)


def test_without_compiled_kernels_a_cut_of_the_prompt_changes_logits_by_roundings_only(note: Note) -> None:
    checkpoint = replace(load("int8", kernels="stock"), max_model_len=128)
    bits = compare(Bits(checkpoint, tolerance=5e-4), 8)
    note(f"{checkpoint.info.product}, cut prompts: {bits.rows} rows within {bits.tolerance:g}")
    assert bits.different == []


@pytest.mark.parametrize(
    ("kernels", "arguments", "product", "mixes"),
    [
        ("compiled", (), "by compiled AVX2 kernels", 20),
        pytest.param("compiled", (), "by compiled AVX2 kernels", 2000, marks=pytest.mark.long),
        pytest.param("stock", ("--whole-prompts",), "oneDNN with unsigned 7-bit terms", 100, marks=pytest.mark.long),
    ],
    ids=["compiled", "compiled, many", "stock"],
)
def test_they_are_the_same_bits_with_the_instructions_of_an_older_processor(
    kernels: str, arguments: tuple[str, ...], product: str, mixes: int, note: Note
) -> None:
    if kernels == "compiled":
        needs_compiled_kernels("avx2")
    setting = "stock" if kernels == "stock" else "auto"
    compared = subprocess.run(
        [sys.executable, "-m", "engine.exact_bits", "--mixes", str(mixes), "--kernels", setting, *arguments],
        env=os.environ | CAPPED | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    note(compared.stdout.strip())
    assert compared.returncode == 0, compared.stderr
    assert product in compared.stdout
    figures = re.search(r"(\d+) mixes, (\d+) rows, (\d+) cancelled", compared.stdout)
    assert figures is not None
    compared_mixes, rows, cancelled = map(int, figures.groups())
    assert compared_mixes == mixes
    assert rows > 15 * mixes
    assert cancelled > mixes / 20
