"""In INT8, tokens and logits of a sequence are the same bits alone, in any mix and cut of prompts, with any adapters.

`exact_bits` has the slots and chunk sizes, and compares.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from engine.engines import EMBEDDED, load, needs_compiled_kernels
from engine.exact_bits import Bits

from models.quantized_checkpoints import write

MIXES = int(os.environ.get("EXACT_BITS_MIXES", "10"))
"""Mixes of a case; hundreds after a change to kernels, scheduler or KV cache."""
EVENTS = {"cancelled", "preempted", "evicted", "hits", "failed", "embedded"}
"""Events that each case must contain, in 10 mixes or more."""


@pytest.mark.parametrize(
    ("cache", "terms", "instructions", "options"),
    [
        ("auto", "auto", "", set()),
        ("float32", "1", "", set()),
        ("int8", "2", "AVX2", {"guessed"}),
        ("auto", "auto", "", {"guessed", "adapted"}),
    ],
)
def test_tokens_have_the_same_bits_in_any_mix(
    cache: str, terms: str, instructions: str, options: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiled_kernels(instructions.lower() or None)
    if instructions:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", instructions)
    checkpoint = replace(load("int8", kv_cache_dtype=cache, int8_terms=terms), max_model_len=128)
    assert f"by compiled {instructions or 'AVX'}" in checkpoint.info.product
    bits = Bits(checkpoint, MIXES, kv_cache_dtype=cache, drafts="guessed" in options, adapters="adapted" in options)
    assert bits.different == []
    assert bits.rows > 15 * MIXES
    assert {event for event, count in bits.events.items() if count} >= EVENTS | options
    assert all(bits.events[event] > MIXES for event in options)


def test_adapters_on_4_bit_groups_have_the_same_bits_in_any_mix(tmp_path: Path) -> None:
    needs_compiled_kernels()
    folder = write(EMBEDDED, "gptq4-act-order", tmp_path / "gptq")
    checkpoint = replace(load("checkpoint", model=str(folder)), max_model_len=128)
    bits = Bits(checkpoint, MIXES, drafts=True, adapters=True)
    assert bits.different == []
    assert bits.events["adapted"] > MIXES
