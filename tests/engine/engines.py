"""Shortcuts to a real checkpoint and engine.

Settings come from the arguments alone, never from the machine's environment.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint, load_checkpoint
from llama_engine.sequence import Completion
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer, Vocabulary


def load(quantization: str, **parameters: str) -> Checkpoint:
    """Load a checkpoint on the CPU, the embedded one if no `model` is given."""
    return load_checkpoint(Settings.parse({"quantization": quantization, **parameters}, {}), torch.device("cpu"))


def engine_of(checkpoint: Checkpoint, slots: int = 8, **parameters: str) -> Engine:
    return Engine(checkpoint, Settings.parse(parameters, {}), slots)


def with_tokens_as_text(checkpoint: Checkpoint) -> Checkpoint:
    """The same model, but every token, a special one too, is "<its number> ": a completion's text shows its tokens."""
    pieces = [f"{token} ".encode() for token in range(checkpoint.config.vocab_size)]
    return replace(checkpoint, tokenizer=Tokenizer(checkpoint.tokenizer.pretrained, Vocabulary(pieces)))


def tokens_in(text: str) -> list[int]:
    """The tokens of a completion by a checkpoint of `with_tokens_as_text`."""
    return [int(token) for token in text.split()]


def completions(engine: Engine, requests: Iterable[GenerationRequest]) -> list[Completion]:
    """Run the requests, each of which must succeed."""
    results = engine.generate(requests)
    assert all(isinstance(result, Completion) for result in results), results
    return [result for result in results if isinstance(result, Completion)]


def alone(checkpoint: Checkpoint, requests: Iterable[GenerationRequest]) -> list[Completion]:
    """Run the requests one after the other on an engine of one slot."""
    return completions(engine_of(checkpoint, 1), requests)
