"""Actions before the forward passes of a checkpoint's decoder, through PyTorch's hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import Checkpoint
from torch import nn


@dataclass(frozen=True)
class ForwardPass:
    """A pass that is about to run. number: from 0. tokens, positions: [rows, width]. cache: the one it is bound to."""

    number: int
    tokens: torch.Tensor
    positions: torch.Tensor
    cache: KVCache

    @property
    def width(self) -> int:
        """Tokens per row; 1 is a decode step, if no prompt has a single token."""
        return self.tokens.shape[1]


@contextmanager
def watching(checkpoint: Checkpoint, action: Callable[[ForwardPass], object]) -> Iterator[None]:
    """Call `action` before each pass, which doesn't run if it raises."""
    numbers = count()

    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tokens, positions, cache = kwargs["input_ids"], kwargs["position_ids"], kwargs["past_key_values"]
        assert isinstance(tokens, torch.Tensor)
        assert isinstance(positions, torch.Tensor)
        assert isinstance(cache, KVCache)
        action(ForwardPass(next(numbers), tokens, positions, cache))

    with checkpoint.model.model.register_forward_pre_hook(hook, with_kwargs=True):
        yield
