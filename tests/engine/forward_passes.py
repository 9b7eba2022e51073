"""Actions before the forward passes of engines, at their model runners."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from unittest.mock import patch

import torch
from llama_engine.model.cpu_runner import CpuRunner
from llama_engine.model.model_runner import TokenChunk
from llama_engine.model.torch_runner import TorchRunner

Runner = CpuRunner | TorchRunner

RUNNERS = (CpuRunner, TorchRunner)


@dataclass(frozen=True)
class ForwardPass:
    """A pass that is about to run. number: from 0. chunks: of a decode step, one token per row."""

    number: int
    chunks: Sequence[TokenChunk]
    decodes: bool

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def longest(self) -> int:
        """Tokens of the longest chunk."""
        return max(len(chunk.tokens) for chunk in self.chunks)

    @property
    def last_position(self) -> int:
        """The greatest position that is written."""
        return max(chunk.start + len(chunk.tokens) - 1 for chunk in self.chunks)


@contextmanager
def watching(action: Callable[[ForwardPass], object]) -> Iterator[None]:
    """Call `action` before each pass of any engine, which doesn't run if it raises."""
    numbers = count()

    def run_chunks(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(runner: Runner, chunks: Sequence[TokenChunk], every: bool = False) -> torch.Tensor:
            action(ForwardPass(next(numbers), chunks, decodes=False))
            return original(runner, chunks, every)

        return watched

    def decode(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(
            runner: Runner, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, span: int
        ) -> torch.Tensor:
            rows = zip(slots.tolist(), positions.tolist(), tokens.tolist(), strict=True)
            chunks = [TokenChunk(slot, position, (token,)) for slot, position, token in rows]
            action(ForwardPass(next(numbers), chunks, decodes=True))
            return original(runner, slots, tokens, positions, span)

        return watched

    with ExitStack() as replaced:
        for runner in RUNNERS:
            replaced.enter_context(patch.object(runner, "run_chunks", run_chunks(runner.run_chunks)))
            replaced.enter_context(patch.object(runner, "decode", decode(runner.decode)))
        yield
