"""Log probabilities of a prompt's tokens, computed with its prefill, in pieces that the memory plan covers."""

from __future__ import annotations

import torch

from llama_engine.model.model_runner import ModelRunner, PromptChunk
from llama_engine.sampling.log_probs import TokenLogProbs, log_probs_of
from llama_engine.sequence import Sequence
from llama_engine.transfer import to_device


def prompt_log_probs(
    model: ModelRunner, sequence: Sequence, chunk: PromptChunk, hidden: torch.Tensor, rows: int
) -> list[TokenLogProbs]:
    """Return the log probabilities of the prompt's tokens that follow those of a chunk; empty where none are asked for.

    hidden: hidden states of the chunk's tokens, [tokens, hidden]. rows: how many logits, of the whole vocabulary each,
    are computed at once.
    """
    top = sequence.request.prompt_logprobs
    if top is None:
        return []
    # What follows the prompt's last token is no prompt token.
    following = sequence.request.prompt_tokens[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]
    log_probs: list[TokenLogProbs] = []
    for first in range(0, len(following), rows):
        tokens = to_device(following[first : first + rows], hidden.device)
        logits = model.logits(hidden[first : first + len(tokens)]).float()
        log_probs += log_probs_of(logits, tokens, [top] * len(tokens))
    return log_probs
