"""Log probabilities of a prompt's tokens, computed with its prefill in blocks that fit the memory plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llama_engine.model.model_runner import ModelRunner, PromptChunk
from llama_engine.sampling.log_probs import TokenLogProbs, pack, unpack
from llama_engine.sequence import Sequence as EngineSequence
from llama_engine.transfer import to_device, to_host


def prompt_log_probs(
    model: ModelRunner,
    sequences: Sequence[EngineSequence],
    chunks: Sequence[PromptChunk],
    hidden: torch.Tensor,
    rows: int,
) -> list[list[TokenLogProbs]]:
    """Return the log probabilities of the prompt tokens that each sequence's chunk predicts; one read of the device.

    A chunk of tokens i … j predicts tokens i + 1 … j + 1. A sequence without prompt_logprobs has none. hidden: hidden
    states of all chunks' tokens, [tokens, hidden]. rows: number of tokens whose logits are computed at once.
    """
    blocks: list[tuple[int, list[int], torch.Tensor]] = []
    states_of = torch.split(hidden, [len(chunk.tokens) for chunk in chunks])
    for index, (sequence, chunk, states) in enumerate(zip(sequences, chunks, states_of, strict=True)):
        top = sequence.request.prompt_logprobs
        if top is None or not sequence.needs_prompt_log_probs:
            continue
        # One token shorter for the last chunk: the prompt's last token predicts an output token.
        following = sequence.request.prompt_tokens[chunk.start + 1 : chunk.start + 1 + len(chunk.tokens)]
        for first in range(0, len(following), rows):
            tokens = to_device(following[first : first + rows], hidden.device)
            logits = model.logits(states[first : first + len(tokens)]).float()
            tops = [top] * len(tokens)
            blocks.append((index, tops, pack(logits, tokens, tops)))
    log_probs: list[list[TokenLogProbs]] = [[] for _ in sequences]
    # Read when all blocks are launched.
    packed = to_host([block for _, _, block in blocks]) if blocks else ()
    for (index, tops, _), block in zip(blocks, packed, strict=True):
        log_probs[index] += unpack(block, tops)
    return log_probs
