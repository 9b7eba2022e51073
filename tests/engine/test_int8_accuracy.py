"""What INT8 weights cost in accuracy, on the embedded checkpoint."""

from __future__ import annotations

import random

import torch
from engine.engines import runner_with_pages
from engine.prompts import random_prompt
from llama_engine.model.loader import LoadedModel
from llama_engine.model.model_runner import PromptChunk
from torch.nn.functional import kl_div, nll_loss


def _log_probs(checkpoint: LoadedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the log probabilities of what follows each token but the last one, [tokens - 1, vocabulary]."""
    runner = runner_with_pages(checkpoint)
    with torch.inference_mode():
        return runner.logits(runner.prefill([PromptChunk(0, 0, tokens)], every=True))[:-1].log_softmax(-1)


def test_int8_weights_cost_less_than_a_hundredth_in_perplexity(fp32: LoadedModel, int8: LoadedModel) -> None:
    randomness, losses, divergences = random.Random(6), [], []
    for _ in range(12):
        tokens = random_prompt(fp32.tokenizer, range(100, 300), randomness)[1]
        exact, rounded = (_log_probs(checkpoint, tokens) for checkpoint in (fp32, int8))
        divergences.append(kl_div(rounded, exact, reduction="none", log_target=True).sum(-1))
        following = torch.tensor(tokens[1:])
        losses.append(torch.stack([nll_loss(scores, following, reduction="none") for scores in (exact, rounded)]))
    before, after = torch.cat(losses, 1).mean(1).exp().tolist()
    assert 0 < abs(after / before - 1) < 0.01
    assert 0 < torch.cat(divergences).mean() < 0.01
