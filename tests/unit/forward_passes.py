"""Doing something before or after the forward passes of a checkpoint's decoder, through PyTorch's own hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from llama_engine.cache import SlotCache
from llama_engine.checkpoint import Checkpoint
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast


@contextmanager
def before_each(checkpoint: Checkpoint, action: Callable[[int, SlotCache], None]) -> Iterator[None]:
    """Call `action` with the number of the pass, from 0, and the cache it is aimed at."""
    passes = iter(range(1 << 30))

    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        cache = kwargs["past_key_values"]
        assert isinstance(cache, SlotCache)
        action(next(passes), cache)

    handle = checkpoint.model.model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def after_each(checkpoint: Checkpoint, action: Callable[[int, SlotCache, torch.Tensor], None]) -> Iterator[None]:
    """Call `action` with the number of the pass, the cache, and the hidden states that it may change in place."""
    passes = iter(range(1 << 30))

    def hook(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: BaseModelOutputWithPast
    ) -> None:
        cache = kwargs["past_key_values"]
        assert isinstance(cache, SlotCache)
        assert output.last_hidden_state is not None
        action(next(passes), cache, output.last_hidden_state)

    handle = checkpoint.model.model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
