"""Computes a prefill pass: hidden states of chunks of prompts, the log probabilities of their tokens, embeddings."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from llama_engine.engine.pooler import Pooler
from llama_engine.engine.sequence import Sequence
from llama_engine.kernels.transfers import to_device
from llama_engine.model.model_runner import ModelRunner, TokenChunk
from llama_engine.sampling.log_probs import TokenLogProbs, token_scores


class ComputedChunks(NamedTuple):
    """The output of a pass over some sequences. hidden: hidden states of the chunks' last tokens, [sequences, hidden].
    scores: result of `log_probs.token_scores`. pooled: results of `Pooler.pool`, None for completions."""

    sequences: list[Sequence]
    chunks: list[TokenChunk]
    hidden: torch.Tensor
    scores: list[list[TokenLogProbs]]
    pooled: list[torch.Tensor | None]


def compute_chunks(
    model: ModelRunner, pooler: Pooler | None, sequences: list[Sequence], chunks: list[TokenChunk], block_size: int
) -> ComputedChunks:
    """Compute a chunk of each sequence's prompt. Repeatable: it changes no sequence.

    block_size: tokens whose logits are computed at once.
    """
    scores: list[list[TokenLogProbs]] = [[] for _ in sequences]
    pooled: list[torch.Tensor | None] = [None] * len(sequences)
    scored = any(sequence.scored_from is not None for sequence in sequences)
    embeds = any(sequence.request.return_embedding for sequence in sequences)
    if not (scored or embeds):
        return ComputedChunks(sequences, chunks, model.run_chunks(chunks), scores, pooled)
    states = model.run_chunks(chunks, every=True)
    ends = accumulate(len(chunk.tokens) for chunk in chunks)
    hidden = states[to_device([end - 1 for end in ends], states.device)]
    if scored:
        scores = token_scores(model, sequences, chunks, states, block_size)
    if embeds:
        assert pooler is not None
        pooled = pooler.pool(sequences, chunks, states)
    return ComputedChunks(sequences, chunks, hidden, scores, pooled)
