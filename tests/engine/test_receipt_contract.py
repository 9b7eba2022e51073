"""Kernels, sampler and guides give the bits of their CONTRACT: stored receipts verify on every instruction set."""

from __future__ import annotations

import json

import pytest
from engine.cpu_kernels.models import kernels
from engine.engines import load
from engine.guided_texts import EngineOf
from engine.receipts import GOLDEN, golden, verify
from llama_engine.kernels.cpu.build import INSTRUCTION_SETS
from llama_engine.model import products

CHANGED = """
The compiled kernels, the sampler or the guides give other tokens than those of this CONTRACT: receipts of earlier
releases no longer verify. If that is intended, raise CONTRACT (llama_engine/api/origin.py) and write the stored
receipts again with `PYTHONPATH=tests:model_repository/llama/1 .venv/bin/python -m engine.receipts`. If the embedded
checkpoint has changed, write them again alone."""


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_stored_receipts_have_the_bits_of_this_contract(
    name: str, engine_with_guides: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "choose_cpu_kernels", lambda: kernels(name))
    engine = engine_with_guides(load("int8"), 8)
    stored = json.loads(GOLDEN.read_text())
    computed = json.loads(json.dumps(golden(engine)))
    assert [row["receipt"] for row in computed] == [row["receipt"] for row in stored], CHANGED
    assert [row["cum_log_prob"] for row in computed] == [row["cum_log_prob"] for row in stored], CHANGED
    verifications = verify(engine, *[json.dumps(row["receipt"]) for row in stored])
    assert [verification["equal"] for verification in verifications] == [True] * len(stored), CHANGED
