"""The decode step: the next token of every slot in use, by replayed CUDA graphs where there are any, else launched.

The slots in use are the first ones. The first `decoding` of them run a forward pass; the others have just been
prefilled, and their last hidden states are passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from llama_engine.cuda_graphs import DecodeGraphs
from llama_engine.isolation import compute_isolated
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sampling.sampler import FAILED, Sampler
from llama_engine.sequence import Sequence, failure, names_of
from llama_engine.slot_batch import SlotBatch

MAX_FAILED_REPLAYS = 3
"""Consecutive failures after which graphs are no longer used."""

_log = logging.getLogger(__name__)


class DecodeStep:
    """Computes the next tokens of a slot batch. Not thread-safe."""

    def __init__(
        self, model: ModelRunner, sampler: Sampler, batch: SlotBatch, on_error: Callable[[Exception, str], bool]
    ) -> None:
        """on_error: logs a failed computation; returns whether it exhausted the device's memory."""
        self._model, self._sampler, self._batch = model, sampler, batch
        self._on_error = on_error
        self.graphs: DecodeGraphs | None = None
        """Captured steps; None launches every kernel."""
        self._failed_replays = 0

    def run(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Return the next token of every slot in use, [rows], and store it as the input of the slot's next step.

        prefilled: hidden states, [rows, hidden] in all, of the slots behind the first `decoding`. FAILED stands for a
        token that can't be computed: the sequence has its result, or its logits were not finite.
        """
        tokens = self._replay(decoding, prefilled)
        if tokens is None:
            tokens = self._launch(decoding, prefilled)
            self._batch.advance(decoding, tokens)
        # A replay advances the tensors itself.
        for sequence in self._batch.sequences[:decoding]:
            sequence.num_cached += 1
        return tokens

    def _replay(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor | None:
        """Replay the captured step; None if there is none or it fails."""
        if self.graphs is None:
            return None
        try:
            tokens = self.graphs.step(decoding, prefilled)
        except Exception as error:  # noqa: BLE001 - launching finds the sequence that fails, and spares the others
            self._on_error(error, f"replaying a step over {names_of(self._batch.sequences)}")
            self._failed_replays += 1
            if self._failed_replays == MAX_FAILED_REPLAYS:
                _log.error("%d consecutive replays failed; CUDA graphs are no longer used", MAX_FAILED_REPLAYS)
                self.graphs = None
            return None
        self._failed_replays = 0
        return tokens

    def _launch(self, decoding: int, prefilled: list[torch.Tensor]) -> torch.Tensor:
        """Compute the tokens of all slots in use, [rows]; where that fails, of halves of them."""
        batch = self._batch
        slots = {sequence: slot for slot, sequence in enumerate(batch.sequences)}

        def compute(part: list[Sequence]) -> torch.Tensor:
            first = slots[part[0]]
            last = first + len(part)
            hidden = []
            if first < decoding:
                rows = slice(first, min(last, decoding))
                span = self._model.decode_span(max(sequence.num_cached for sequence in batch.sequences[rows]))
                hidden.append(self._model.decode(first, batch.tokens[rows], batch.positions[rows], span))
            if last > decoding:
                hidden.append(torch.cat(prefilled)[max(first - decoding, 0) : last - decoding])
            logits = self._model.logits(torch.cat(hidden))
            return self._sampler.sample(logits, first, part, batch.features)

        def on_error(part: list[Sequence], error: Exception) -> bool:
            return self._on_error(error, f"the next tokens of {names_of(part)}")

        def fail(sequence: Sequence, exhausted: bool) -> torch.Tensor:
            sequence.finish(failure(sequence, exhausted))
            return torch.tensor([FAILED], device=batch.tokens.device)

        return torch.cat(compute_isolated(batch.sequences, compute, on_error, fail))
