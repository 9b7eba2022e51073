"""LoRA adapters in the CPU kernels: near the reference, and a token's bits don't depend on its neighbours' adapters."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from engine.cpu_kernels.models import PLAIN, peer, random_adapter, random_tokens, runner, small_llama
from engine.cpu_kernels.test_cpu_forward import ALL_OPTIONS, MODELS, SHAPES, each_instruction_set
from engine.int8_layers import threads
from llama_engine.kernels.activation_terms import TWO_TERMS

FUSED = "fused"
FORMS = cycle(((1, torch.float32), (8, torch.bfloat16), (40, torch.float32), (33, torch.bfloat16)))
"""Rank and dtype of an adapter."""

ADAPTED = {"odd sizes": SHAPES["odd sizes"], "GQA 8": SHAPES["GQA 8"], "all options": ALL_OPTIONS, FUSED: PLAIN}


@each_instruction_set
@pytest.mark.parametrize(("model", "rank", "dtype"), [(model, *next(FORMS)) for model in ADAPTED])
def test_adapted_logits_are_near_the_reference(name: str, model: str, rank: int, dtype: torch.dtype) -> None:
    llama = small_llama(replace(ADAPTED[model], fused=model == FUSED))
    tokens = random_tokens(20, 0, llama.architecture.vocabulary)
    adapter = random_adapter(llama.architecture, 1, rank, dtype)
    run = runner(name, llama, torch.float32, TWO_TERMS, adapters=[adapter])
    run.forward.loras.set(3, 1)
    result, expected = run.logits(tokens, 3, 0), llama.reference(tokens, adapter)
    assert (expected - llama.reference(tokens)).abs().max() > 0.1 * expected.abs().max()
    assert (result - expected).abs().max() <= 3e-4 * expected.abs().max()


@each_instruction_set
@pytest.mark.parametrize("model", MODELS)
def test_adapters_of_neighbours_change_no_bit(name: str, model: str) -> None:
    architecture, grouped = MODELS[model]
    llama = small_llama(architecture, grouped=grouped)
    adapters = [random_adapter(architecture, seed, 8 * seed, torch.bfloat16) for seed in (1, 2)]
    sequences = [random_tokens(length, length, architecture.vocabulary) for length in (31, 32, 33, 34, 35)]
    of_slot = (1, 0, 2, 1, 1)

    def alone(slot: int) -> torch.Tensor:
        run = runner(peer(name), llama, adapters=adapters)
        run.forward.loras.set(0, of_slot[slot])
        return run.logits(sequences[slot], 0, 0)

    expected = [alone(slot) for slot in range(5)]
    assert len({logits[-1, 0].item() for logits in expected}) == 5
    run = runner(name, llama, adapters=adapters, room=7)
    for slot, adapter in enumerate(of_slot):
        run.forward.loras.set(slot, adapter)
    with threads(2):
        # All prompts but their last tokens in one pass, and these in another.
        lengths = torch.tensor([len(tokens) - 1 for tokens in sequences])
        positions = torch.cat([torch.arange(length) for length in lengths])
        prompts = run.logits(
            torch.cat([tokens[:-1] for tokens in sequences]), torch.arange(5).repeat_interleave(lengths), positions
        )
        step = run.logits(torch.stack([tokens[-1] for tokens in sequences]), torch.arange(5), lengths)
    assert torch.equal(prompts, torch.cat([logits[:-1] for logits in expected]))
    assert torch.equal(step, torch.stack([logits[-1] for logits in expected]))


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    adapter = random_adapter(PLAIN, 1, 4, torch.float32)
    loras = runner("avx2", adapters=[adapter]).forward.loras
    with pytest.raises(IndexError, match="adapter 2 is outside the room for 1"):
        loras.load(2, adapter)
    loras.load(1, None)
    with pytest.raises(IndexError, match="adapter 1 is not loaded"):
        loras.set(0, 1)
