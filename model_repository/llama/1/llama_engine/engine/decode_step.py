"""The decode step: forward pass, logits and sampling of each decoding sequence's next token."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from llama_engine.engine.isolation import Isolation
from llama_engine.engine.sequence import Sequence, names_of
from llama_engine.engine.slot_batch import SlotBatch
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sampling.sampler import FAILED, Sampler

MAX_FAILED_REPLAYS = 3
"""Consecutive failed replays after which CUDA graphs are no longer used."""

_log = logging.getLogger(__name__)


class CapturedSteps(Protocol):
    """Decode steps that were captured as CUDA graphs."""

    @property
    def count(self) -> int:
        """Number of captured graphs."""

    def step(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Replay a step. Arguments and result are those of `DecodeStep.run`. If it raises, nothing has been stored."""


class DecodeStep:
    """Computes the next token of every row in use, by CUDA graphs if they are captured. Not thread-safe.

    The first `decoding` rows run a forward pass. The remaining rows have just been prefilled: their last hidden states
    are an argument.
    """

    def __init__(self, model: ModelRunner, sampler: Sampler, batch: SlotBatch, isolation: Isolation) -> None:
        self._model, self._sampler, self._batch, self._isolation = model, sampler, batch, isolation
        self.graphs: CapturedSteps | None = None
        """Captured decode steps; None launches each kernel separately."""
        self._failed_replays = 0

    def run(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Return the next token of every row in use, [rows], and store it as the input of the row's next step.

        decoding: number of leading rows that run a forward pass. prefilled: hidden states of the remaining rows,
        [rows, hidden] in all. A token is FAILED if the row's computation failed or its logits were not finite.
        """
        tokens = self._replay(decoding, prefilled)
        if tokens is None:
            tokens = self._launch(decoding, prefilled)
            self._batch.advance(decoding, tokens)
        # A replay advances the batch's tensors itself, but not these counts.
        for sequence in self._batch.sequences[:decoding]:
            sequence.num_cached += 1
        return tokens

    def _replay(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor | None:
        """Replay the captured step and return its tokens, [rows]; None if nothing is captured or the replay fails."""
        if self.graphs is None:
            return None
        try:
            tokens = self.graphs.step(decoding, prefilled)
        except Exception as error:  # noqa: BLE001 - the launched step isolates the sequence that fails
            self._isolation.record(error, f"replaying a step over {names_of(self._batch.sequences)}")
            self._failed_replays += 1
            if self._failed_replays == MAX_FAILED_REPLAYS:
                _log.error("%d consecutive replays failed; CUDA graphs are no longer used", MAX_FAILED_REPLAYS)
                self.graphs = None
            return None
        self._failed_replays = 0
        return tokens

    def _launch(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Compute the tokens of all rows in use, [rows], without graphs; on a failure, retry the rows in halves."""
        batch = self._batch
        row_of = {sequence: row for row, sequence in enumerate(batch.sequences)}

        def compute(part: list[Sequence]) -> torch.Tensor:
            first = row_of[part[0]]
            last = first + len(part)
            hidden = []
            if first < decoding:
                rows = slice(first, min(last, decoding))
                span = max(sequence.num_cached for sequence in batch.sequences[rows]) + 1
                states = batch.kv_slots[rows], batch.tokens[rows], batch.positions[rows]
                hidden.append(self._model.decode(*states, span))
            if last > decoding:
                hidden.append(torch.cat(prefilled)[max(first - decoding, 0) : last - decoding])
            logits = self._model.logits(torch.cat(hidden))
            return self._sampler.sample(logits, first, part, batch.features)

        parts, failed = self._isolation.isolate("the next tokens", batch.sequences, compute)
        if not failed:
            return torch.cat(parts)
        tokens = torch.full_like(batch.tokens[: len(batch)], FAILED)
        computed = [row for sequence, row in row_of.items() if sequence not in failed]
        tokens[computed] = torch.cat([tokens[:0], *parts])
        return tokens
