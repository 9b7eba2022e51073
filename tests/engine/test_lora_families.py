"""An adapter of PEFT on each family's checkpoint: greedy FP32 tokens are those of PEFT's own model, in any batch."""

import random
from pathlib import Path

import pytest
from engine.engines import completions, engine_of, load, with_tokens_as_text
from engine.families import CHECKPOINTS, MAX_MODEL_LEN, save_family
from engine.greedy import LONGEST, GreedyReference, Tally, compare_one
from engine.logits import oracle
from engine.lora_adapters import save_adapter
from engine.prompts import random_prompt
from llama_engine.request.generation_request import GenerationRequest
from notes import Note
from transformers import PreTrainedModel


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_adapters_tokens_are_those_of_peft(name: str, tmp_path: Path, note: Note) -> None:
    folder = save_family(tmp_path / "base", name)
    # A Granite multiplies its embedding, beside which a smaller adapter changes no token.
    alpha = 8 * int(CHECKPOINTS[name].get("embedding_multiplier", 1))
    adapted = save_adapter(folder, tmp_path / "adapter", {"r": 4, "lora_alpha": alpha}).get_base_model()
    assert isinstance(adapted, PreTrainedModel)
    checkpoint = with_tokens_as_text(load("none", model=str(folder), max_model_len=str(MAX_MODEL_LEN)))
    # Two slots: sequences with and without the adapter decode together, and others are prefilled in parts meanwhile.
    engine = engine_of(checkpoint, 2, prefill_tokens="40", lora_adapters=f"a={tmp_path / 'adapter'}")
    (loaded,) = engine.adapters.loaded()
    references = {None: GreedyReference(oracle(checkpoint), LONGEST), loaded: GreedyReference(adapted, LONGEST)}
    randomness, tally = random.Random(9), Tally()
    # Beyond the positions of phi3's short factors, which transformers uses for shorter sequences.
    prompts = [random_prompt(checkpoint.tokenizer, range(17, 120), randomness)[1] for _ in range(2)]
    # Each prompt both ways, one after the other: neither takes the other's pages.
    requests = [
        GenerationRequest("", prompt, max_tokens=LONGEST, adapter=adapter)
        for prompt in prompts
        for adapter in references
    ]
    for request, completion in zip(requests, completions(engine, requests), strict=True):
        compare_one(engine, request, completion, references[request.adapter], tally)
    plain, with_adapter = ([each.tokens(prompt, LONGEST) for prompt in prompts] for each in references.values())
    assert all(one != other for one, other in zip(plain, with_adapter, strict=True))
    note(f"{name}: greedy FP32 with and without an adapter against PEFT alone: {tally}")
