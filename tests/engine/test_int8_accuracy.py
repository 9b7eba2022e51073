"""What 8 bits cost in accuracy on the embedded checkpoint, in logits and in perplexity."""

import math
import random

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from engine.prompts import random_prompt
from llama_engine.model.loader import Checkpoint


def _logits(checkpoint: Checkpoint, prompts: list[tuple[int, ...]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [checkpoint.model(input_ids=torch.tensor([prompt])).logits[0].float() for prompt in prompts]


def _perplexity(logits: list[torch.Tensor], prompts: list[tuple[int, ...]]) -> float:
    losses = [
        F.cross_entropy(rows[:-1], torch.tensor(prompt[1:]), reduction="sum").item()
        for rows, prompt in zip(logits, prompts, strict=True)
    ]
    return math.exp(sum(losses) / sum(len(prompt) - 1 for prompt in prompts))


def test_8_bits_cost_more_than_a_hundredth_of_perplexity(fp32: Checkpoint, int8: Checkpoint) -> None:
    randomness = random.Random(6)
    prompts = [random_prompt(fp32.tokenizer, range(100, 300), randomness)[1] for _ in range(12)]
    exact, rounded = _logits(fp32, prompts), _logits(int8, prompts)
    before, after = _perplexity(exact, prompts), _perplexity(rounded, prompts)
    print(f"perplexity {before:.3f} in FP32, {after:.3f} in INT8")
    assert abs(after / before - 1) < 0.01


def test_8_bits_change_the_distribution_or_nothing_at_all(fp32: Checkpoint, int8: Checkpoint) -> None:
    randomness = random.Random(7)
    prompts = [random_prompt(fp32.tokenizer, range(100, 300), randomness)[1] for _ in range(8)]
    divergences, distances = [], []
    for exact, rounded in zip(_logits(fp32, prompts), _logits(int8, prompts), strict=True):
        expected, got = exact.log_softmax(-1), rounded.log_softmax(-1)
        divergences.append((expected.exp() * (expected - got)).sum(-1))
        distances.append((expected - got).std(-1) / expected.std(-1))
    divergence, distance = torch.cat(divergences), torch.cat(distances)
    print(f"KL mean {divergence.mean():.5f}, worst {divergence.max():.4f} nats; relative error {distance.mean():.4f}")
    assert divergence.mean() < 0.01
    assert distance.mean() < 0.05
    assert distance.min() > 0, "INT8 is bit-identical to FP32: it is not in use"
