"""Log probabilities of tokens that prefill reads: of prompts, and of outputs that a request resumes.

They are computed in blocks that fit the memory plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llama_engine.engine.sequence import Sequence as EngineSequence
from llama_engine.model.model_runner import ModelRunner, PromptChunk
from llama_engine.sampling.log_probs import TokenLogProbs, pack, unpack
from llama_engine.transfer import to_device, to_host


def token_scores(
    model: ModelRunner,
    sequences: Sequence[EngineSequence],
    chunks: Sequence[PromptChunk],
    hidden: torch.Tensor,
    rows: int,
) -> list[list[TokenLogProbs]]:
    """Return the log probabilities of the tokens that each sequence's chunk predicts; one read of the device.

    A chunk of tokens i … j predicts tokens i + 1 … j + 1; those before `Sequence.scored_from` are left out. hidden:
    hidden states of all chunks' tokens, [tokens, hidden]. rows: number of tokens whose logits are computed at once.
    """
    blocks: list[tuple[int, list[int], torch.Tensor]] = []
    states_of = torch.split(hidden, [len(chunk.tokens) for chunk in chunks])
    for index, (sequence, chunk, states) in enumerate(zip(sequences, chunks, states_of, strict=True)):
        if sequence.scored_from is None:
            continue
        # The last token predicts one that is sampled.
        end = min(chunk.start + len(chunk.tokens) + 1, sequence.num_tokens)
        for first in range(max(chunk.start + 1, sequence.scored_from), end, rows):
            last = min(first + rows, end)
            tokens = to_device(sequence.tokens(first, last), hidden.device)
            logits = model.logits(states[first - chunk.start - 1 : last - chunk.start - 1]).float()
            tops = [sequence.num_log_probs(position) for position in range(first, last)]
            blocks.append((index, tops, pack(logits, tokens, tops)))
    scores: list[list[TokenLogProbs]] = [[] for _ in sequences]
    # Read when all blocks are launched.
    packed = to_host([block for _, _, block in blocks]) if blocks else ()
    for (index, tops, _), block in zip(blocks, packed, strict=True):
        scores[index] += unpack(block, tops)
    return scores
