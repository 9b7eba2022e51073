"""Distance between two models' next-token distributions over the same text.

For one predicted token with the reference's distribution P and the candidate's Q over the vocabulary:

    KL(P || Q) = sum of P (log P - log Q)      nats; what is lost by using Q where P is right; 0 if they are equal
    agreement  = P and Q have their maximum at the same token: greedy decoding continues alike
    loss       = -log of the probability of the text's token; its mean's exponential is the perplexity

The text is cut into parts of a context, each predicted from its own beginning. By default it is alice.txt: chapter VII
of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, in the public domain), as in the Canterbury corpus, a
paragraph a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from llama_engine.model.loader import LoadedModel
from llama_engine.model.model_runner import TokenChunk
from torch import Tensor
from transformers import PreTrainedTokenizerBase

PROSE = Path(__file__).with_name("alice.txt")
CONTEXT = 512
"""Tokens of a part, where a model allows it."""
MIN_TOKENS = 100
"""Fewer predicted tokens have no 99th percentile."""
POSITIONS_AT_ONCE = 256
"""Positions per pass of the head: a whole text's logits (4,096 x 32,000) would exceed the activations of the rest."""

Texts = Sequence[Sequence[int]]
"""Token ids, at least 2 in each; all but the first are predicted."""


class Distances(NamedTuple):
    """Per predicted token, tensors [tokens] on the CPU: divergence in nats (float64), whether the best is the same."""

    divergence: Tensor
    agrees: Tensor

    def summary(self) -> dict[str, object]:
        """Return the figures for a result file; p99 is by nearest rank, which counts from 1."""
        p99 = self.divergence.kthvalue(math.ceil(0.99 * len(self.divergence))).values
        nats = {"mean": self.divergence.mean(), "p99": p99, "max": self.divergence.max()}
        return {
            "kl_nats": {name: float(f"{value:.5g}") for name, value in nats.items()},
            "top1_agreement": round(float(self.agrees.double().mean()), 6),
        }


class Tokens(NamedTuple):
    """Figures per predicted token, each a float64 or bool tensor [tokens] on the CPU; losses and divergence in nats."""

    reference_loss: Tensor
    loss: Tensor
    divergence: Tensor
    agrees: Tensor


class Forward:
    """The hidden states and logits of texts, one at a time, as the engine computes a loaded checkpoint's prompts."""

    def __init__(self, checkpoint: LoadedModel, kv_cache_dtype: str = "auto") -> None:
        """kv_cache_dtype: the setting."""
        shape = checkpoint.cache_shape(1, kv_cache_dtype)
        self._runner = checkpoint.runner(shape)
        self._runner.cache.set_pages(0, 0, range(1, shape.pages + 1))
        self.logits = self._runner.logits

    def relative_products(self) -> float | None:
        """Return the products since the last call, relative to one term for each row; None if they aren't counted."""
        counts = self._runner.take_term_counts().values()
        one_term = sum(count.tokens * count.inputs * count.outputs for count in counts)
        return sum(count.products for count in counts) / one_term if one_term else None

    @torch.inference_mode()
    def hidden(self, text: Sequence[int]) -> Tensor:
        """Return [tokens, hidden] of a text, in one pass."""
        return self._runner.run_chunks([TokenChunk(0, 0, tuple(text))], every=True)


def from_text(text: str, tokenizer: PreTrainedTokenizerBase, context: int) -> Texts:
    """Cut a text into parts of `context` tokens, at least 2, each after a BOS if the tokenizer has one.

    Raises ValueError for a text with less than MIN_TOKENS to predict.
    """
    # The tokenizer would add a BOS before the first one only.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = context - len(begin)
    texts = [[*begin, *ids[first : first + room]] for first in range(0, len(ids), room)]
    # Without a BOS the last one may have a single token, which nothing predicts.
    texts = [each for each in texts if len(each) > 1]
    if (predicted := sum(len(each) - 1 for each in texts)) < MIN_TOKENS:
        raise ValueError(f"the text has {predicted} tokens to predict; {MIN_TOKENS} are needed")
    return texts


@torch.inference_mode()
def distances(reference: Forward, candidate: Forward, texts: Texts) -> Tokens:
    """Predict every token but each text's first; compare the candidate with the reference.

    Each text is a pass of its own: bitsandbytes takes the outlier columns over everything in a pass.
    """
    parts: list[Tokens] = []
    for text in texts:
        expected, got = reference.hidden(text), candidate.hidden(text)
        targets = torch.tensor(text[1:], device=got.device)
        for first in range(0, len(text) - 1, POSITIONS_AT_ONCE):
            here = slice(first, min(first + POSITIONS_AT_ONCE, len(text) - 1))
            parts.append(compare(reference.logits(expected[here]), candidate.logits(got[here]), targets[here]))
    return Tokens(*map(torch.cat, zip(*parts, strict=True)))


def compare(reference: Tensor, candidate: Tensor, targets: Tensor) -> Tokens:
    """Compare both models' logits [tokens, vocabulary], of any float type; targets: the text's next tokens.

    In float64, because the result is the difference of nearly equal logarithms.
    """
    expected, got = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    # A token of probability 0 adds nothing; 0 * (-inf - -inf) would be NaN.
    terms = torch.where(expected.isneginf(), 0.0, expected.exp() * (expected - got))
    chosen = targets.unsqueeze(-1)
    return Tokens(
        reference_loss=-expected.gather(-1, chosen).squeeze(-1).cpu(),
        loss=-got.gather(-1, chosen).squeeze(-1).cpu(),
        divergence=terms.sum(-1).cpu(),
        agrees=(expected.argmax(-1) == got.argmax(-1)).cpu(),
    )


def perplexity(losses: Tensor) -> float:
    """Return exp of the mean loss, the model card's definition."""
    return math.exp(float(losses.mean()))


def summary(tokens: Tokens) -> dict[str, object]:
    """Return the candidate's perplexity and its distance from the reference in nats per token, for a result file.

    loss_difference: the candidate's loss minus the reference's; within two standard errors of 0 it is noise.
    """
    difference = tokens.loss - tokens.reference_loss
    loss_difference = {"mean": difference.mean(), "standard_error": difference.std() / math.sqrt(len(difference))}
    return {
        "perplexity": round(perplexity(tokens.loss), 4),
        **Distances(tokens.divergence, tokens.agrees).summary(),
        "loss_difference": {name: float(f"{value:.5g}") for name, value in loss_difference.items()},
    }
