"""Embeddings: pools the hidden states of a prompt, chunk by chunk, into one vector."""

from __future__ import annotations

import torch

from llama_engine.checkpoint.pooling import Pooling
from llama_engine.engine.sequence import Sequence
from llama_engine.kernels.final_norm import sums_of_squares
from llama_engine.model.model_runner import ModelRunner, TokenChunk


class Pooler:
    """Pools hidden states as a checkpoint's `Pooling` says; embeddings are as batch-invariant as the hidden states."""

    def __init__(self, model: ModelRunner, pooling: Pooling) -> None:
        self._model, self._pooling = model, pooling

    def pool(
        self, sequences: list[Sequence], chunks: list[TokenChunk], states: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Return for each sequence its `pooled` with the chunk's hidden states, None for a completion; change nothing.

        states: those of all chunks, [tokens, hidden]. With its prompt's last token `pooled` is the embedding, [hidden]
        in float32. Raises ValueError if that isn't finite.
        """
        by_chunk = torch.split(states, [len(chunk.tokens) for chunk in chunks])
        return [
            self._pool_chunk(sequence, chunk_states) if sequence.request.return_embedding else None
            for sequence, chunk_states in zip(sequences, by_chunk, strict=True)
        ]

    def _pool_chunk(self, sequence: Sequence, states: torch.Tensor) -> torch.Tensor:
        is_mean = self._pooling.mode == "mean"
        normalized = self._model.normalize(states if is_mean else states[-1:])
        pooled = torch.zeros_like(normalized[:1]) if sequence.pooled is None else sequence.pooled
        # One by one: a library's sum would choose its order by the number of tokens.
        for state in torch.split(normalized, 1):
            pooled = pooled + state if is_mean else state
        if sequence.num_uncomputed > len(states):
            return pooled
        if is_mean:
            pooled = pooled / sequence.num_prompt_tokens
        if self._pooling.normalizes:
            pooled = pooled / sums_of_squares(pooled).sqrt()
        if not pooled.isfinite().all():
            raise ValueError("the embedding is not finite")
        return pooled[0]


def finish_embeddings(sequences: list[Sequence]) -> tuple[list[Sequence], list[int]]:
    """Finish the sequences that have their embedding; return them, and the indices of the others, completions."""
    embedded = [sequence for sequence in sequences if sequence.pooled is not None]
    for sequence in embedded:
        sequence.finish_embedding()
    return embedded, [index for index, sequence in enumerate(sequences) if sequence.pooled is None]
