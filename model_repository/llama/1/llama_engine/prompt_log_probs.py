"""Log probabilities of a prompt's tokens, computed with its prefill in blocks that fit the memory plan."""

from __future__ import annotations

import torch

from llama_engine.model.model_runner import ModelRunner, PromptChunk
from llama_engine.sampling.log_probs import TokenLogProbs, log_probs_of
from llama_engine.sequence import Sequence
from llama_engine.transfer import to_device


def prompt_log_probs(
    model: ModelRunner, sequence: Sequence, chunk: PromptChunk, hidden: torch.Tensor, rows: int
) -> list[TokenLogProbs]:
    """Return the log probabilities of the prompt tokens that a chunk predicts; empty without prompt_logprobs.

    A chunk of tokens i … j predicts tokens i + 1 … j + 1. hidden: hidden states of the chunk's tokens,
    [tokens, hidden]. rows: number of tokens whose logits are computed at once.
    """
    top = sequence.request.prompt_logprobs
    if top is None:
        return []
    # One token shorter for the last chunk: the prompt's last token predicts an output token.
    following = sequence.request.prompt_tokens[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]
    log_probs: list[TokenLogProbs] = []
    for first in range(0, len(following), rows):
        tokens = to_device(following[first : first + rows], hidden.device)
        logits = model.logits(hidden[first : first + len(tokens)]).float()
        log_probs += log_probs_of(logits, tokens, [top] * len(tokens))
    return log_probs
