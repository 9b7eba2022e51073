"""Actions before or after the forward passes of a checkpoint's decoder, through PyTorch's hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import Checkpoint
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast


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
def watching(checkpoint: Checkpoint, action: Callable[[ForwardPass], None]) -> Iterator[None]:
    """Call `action` before each pass, which doesn't run if it raises."""
    passes = iter(range(1 << 30))

    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tokens, positions, cache = kwargs["input_ids"], kwargs["position_ids"], kwargs["past_key_values"]
        assert isinstance(tokens, torch.Tensor)
        assert isinstance(positions, torch.Tensor)
        assert isinstance(cache, KVCache)
        action(ForwardPass(next(passes), tokens, positions, cache))

    handle = checkpoint.model.model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def before_each(checkpoint: Checkpoint, action: Callable[[int, KVCache], None]) -> Iterator[None]:
    """Call `action` before each pass with its number, from 0, and its cache."""
    with watching(checkpoint, lambda one: action(one.number, one.cache)):
        yield


@contextmanager
def after_each(checkpoint: Checkpoint, action: Callable[[int, KVCache, torch.Tensor], None]) -> Iterator[None]:
    """Call `action` after each pass with its number, its cache, and its hidden states, to change in place."""
    passes = iter(range(1 << 30))

    def hook(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: BaseModelOutputWithPast
    ) -> None:
        cache = kwargs["past_key_values"]
        assert isinstance(cache, KVCache)
        assert output.last_hidden_state is not None
        action(next(passes), cache, output.last_hidden_state)

    handle = checkpoint.model.model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def before_each_head(checkpoint: Checkpoint, action: Callable[[int], None]) -> Iterator[None]:
    """Call `action` with the number of rows before the head computes their logits."""

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        action(args[0].shape[0])

    handle = checkpoint.model.lm_head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
