"""Choosing the next token of every row: by replaying graphs where there are some, else by launching; and what is done
where that fails.

The rows sit in the first slots. Those that decode make a step for it; behind them are rows whose prompts have just been
read, and whose last hidden states are at hand. Knows rows only as what has a length and a transcript; what becomes of
a token is the engine's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from llama_engine.model.cuda_graphs import Capture, DecodeGraphs, record_graphs
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import ModelRunner
from llama_engine.rows import Row, failure, named
from llama_engine.sampling.sampler import FAILED, Sampler

REPLAYS = 3
"""So many that fail one after the other are the last."""

_log = logging.getLogger(__name__)


class Choosing:
    """Chooses the tokens of one engine's steps. Not thread-safe."""

    def __init__(
        self, model: ModelRunner, sampler: Sampler, device: torch.device, on_error: Callable[[Exception, str], bool]
    ) -> None:
        """`on_error` is told of everything that fails, also of what succeeds in parts later.

        It returns whether the device's memory was exhausted.
        """
        self._model, self._sampler, self._device = model, sampler, device
        self._on_error = on_error
        self._graphs: DecodeGraphs | None = None
        self._failed_replays = 0

    @property
    def replays(self) -> bool:
        """Whether decode steps are CUDA graphs."""
        return self._graphs is not None

    def record_graphs(self, checkpoint: Checkpoint, shape: KVCacheShape, capture: Capture | None) -> None:
        """Let decode steps be graphs from here on, if they can be; only while no row is seated."""
        self._graphs = record_graphs(checkpoint, self._model, self._sampler, shape, capture)

    def next_tokens(self, rows: Sequence[Row], decoding: int, prompted: list[torch.Tensor]) -> torch.Tensor:
        """Choose a token for each row, and note it as the input of its next step; [rows], FAILED where it can't be.

        decoding: the first so many rows make a step. prompted: hidden states of the others, [rows, hidden] in all. A
        row that can't be computed even alone has its outcome then.
        """
        if self._graphs is not None:
            try:
                tokens = self._replay(self._graphs, rows, decoding, prompted)
            except Exception as error:  # noqa: BLE001 - launched, the failing row is found, and the others go on
                self._on_error(error, f"replaying a step over {named(rows)}")
                self._give_up_graphs_after_some()
            else:
                self._failed_replays = 0
                return tokens
        tokens = torch.cat(self._launch(rows, 0, decoding, prompted))
        self._model.advance(decoding, tokens)
        return tokens

    def _replay(
        self, graphs: DecodeGraphs, rows: Sequence[Row], decoding: int, prompted: list[torch.Tensor]
    ) -> torch.Tensor:
        longest = max((row.length for row in rows[:decoding]), default=0)
        steps = [row.transcript.num_tokens for row in rows]
        return graphs.step(decoding, longest, prompted, steps, [row.banned for row in rows])

    def _give_up_graphs_after_some(self) -> None:
        self._failed_replays += 1
        if self._failed_replays == REPLAYS:
            _log.error("%d replays in a row have failed; steps are launched kernel by kernel from here on", REPLAYS)
            self._graphs = None

    def _launch(
        self, rows: Sequence[Row], first: int, decoding: int, prompted: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Choose the tokens of the rows that sit in the slots `first` …, [rows] in all.

        decoding, prompted: of all rows. If that fails, each half by itself, down to the row that can't be computed even
        alone: FAILED.
        """
        last = first + len(rows)
        try:
            hidden = []
            if first < decoding:
                longest = max(row.length for row in rows[: decoding - first])
                hidden.append(self._model.step(first, min(last, decoding), longest))
            if last > decoding:
                hidden.append(torch.cat(prompted)[max(first - decoding, 0) : last - decoding])
            logits = self._model.logits(torch.cat(hidden))
            steps = [row.transcript.num_tokens for row in rows]
            return [self._sampler.sample(logits, first, steps, [row.banned for row in rows])]
        except Exception as error:  # noqa: BLE001 - the rows must get an answer, and the others go on
            exhausted = self._on_error(error, f"choosing the next tokens of {named(rows)}")
        # Out here and not in the handler, where the exception would hold what the failed pass had allocated.
        if len(rows) == 1:
            rows[0].outcome = failure(rows[0], exhausted)
            return [torch.tensor([FAILED], device=self._device)]
        half = len(rows) // 2
        return [
            *self._launch(rows[:half], first, decoding, prompted),
            *self._launch(rows[half:], first + half, decoding, prompted),
        ]
