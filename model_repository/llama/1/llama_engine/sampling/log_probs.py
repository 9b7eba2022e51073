"""Log probabilities of tokens: the log softmax of the model's raw logits, before bias and penalties.

Sums are in double precision: rounded to float32, a sequence's values don't depend on the others of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from llama_engine.kernels.transfers import to_device, to_host
from llama_engine.model.model_runner import ModelRunner, TokenChunk

if TYPE_CHECKING:
    from llama_engine.engine.sequence import Sequence as EngineSequence


@dataclass(frozen=True)
class TokenLogProbs:
    """The log probability of one token. rank: 1 is the most likely. top: ids and log probabilities of the likeliest."""

    token: int
    log_prob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def pack(logits: torch.Tensor, tokens: torch.Tensor, top: Sequence[int]) -> torch.Tensor:
    """Return the log probabilities of tokens [batch] given logits [batch, vocabulary], float32, on the device.

    [batch, 3 + 2 · largest top], float64, which holds every id exactly. Columns: token, log probability, rank, ids of
    the most likely tokens, their log probabilities. top: number of most likely tokens for each sequence.
    """
    chosen = logits.gather(1, tokens[:, None])
    total = logits.double().logsumexp(-1, keepdim=True)
    log_probs = (chosen.double() - total).float()
    ranks = (logits > chosen).sum(-1, keepdim=True) + 1
    counts = [min(count, logits.shape[1]) for count in top]
    ids, values = torch.zeros(2, len(top), max(counts), dtype=torch.float64, device=logits.device)
    # One topk call per count: the order of equal logits depends on the count, which must be the sequence's.
    for count in sorted(set(counts) - {0}):
        selected = to_device([index for index, requested in enumerate(counts) if requested == count], logits.device)
        best, indices = logits[selected].topk(count)
        ids[selected, :count] = indices.double()
        values[selected, :count] = (best.double() - total[selected]).float().double()
    return torch.cat((tokens[:, None].double(), log_probs.double(), ranks.double(), ids, values), dim=1)


def unpack(packed: torch.Tensor, top: Sequence[int]) -> list[TokenLogProbs]:
    """Return the log probabilities of each sequence in `pack`'s result; reads the device once. top: as for `pack`."""
    log_probs = []
    for (token, log_prob, rank, *best), count in zip(packed.tolist(), top, strict=True):
        ids, values = best[: len(best) // 2], best[len(best) // 2 :]
        likeliest = tuple(zip(map(int, ids[:count]), values[:count], strict=True))
        log_probs.append(TokenLogProbs(int(token), log_prob, int(rank), likeliest))
    return log_probs


def token_scores(
    model: ModelRunner,
    sequences: Sequence[EngineSequence],
    chunks: Sequence[TokenChunk],
    hidden: torch.Tensor,
    block_size: int,
) -> list[list[TokenLogProbs]]:
    """Return the log probabilities of the tokens that each sequence's chunk predicts; one read of the device.

    A chunk of tokens i … j predicts tokens i + 1 … j + 1; those before `Sequence.scored_from` are left out. hidden:
    hidden states of all chunks' tokens, [tokens, hidden]. block_size: tokens whose logits are computed at once.
    """
    blocks: list[tuple[int, list[int], torch.Tensor]] = []
    states_of = torch.split(hidden, [len(chunk.tokens) for chunk in chunks])
    for index, (sequence, chunk, states) in enumerate(zip(sequences, chunks, states_of, strict=True)):
        if sequence.scored_from is None:
            continue
        # The last token predicts one that is sampled.
        end = min(chunk.start + len(chunk.tokens) + 1, sequence.num_tokens)
        for first in range(max(chunk.start + 1, sequence.scored_from), end, block_size):
            last = min(first + block_size, end)
            tokens = to_device(sequence.tokens(first, last), hidden.device)
            logits = model.logits(states[first - chunk.start - 1 : last - chunk.start - 1]).float()
            tops = [sequence.num_log_probs(position) for position in range(first, last)]
            blocks.append((index, tops, pack(logits, tokens, tops)))
    scores: list[list[TokenLogProbs]] = [[] for _ in sequences]
    # Read the results when all blocks are launched.
    packed = to_host([block for _, _, block in blocks]) if blocks else ()
    for (index, tops, _), block in zip(blocks, packed, strict=True):
        scores[index] += unpack(block, tops)
    return scores
