"""Client of a Llama served by Triton: `LlamaClient` and `AsyncLlamaClient`, their parameters, results and errors.

The command line is in `triton_llama.cli`, the health probe in `triton_llama.health`; `triton_llama.errors` draws the
error tree. The names below are imported on first access (PEP 562), because the probe is part of the package and also
runs where neither httpx nor tritonclient is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_llama.async_client import AsyncLlamaClient
    from triton_llama.client import LlamaClient
    from triton_llama.completion import AsyncCompletionStream, Completion, CompletionStream, Piece
    from triton_llama.errors import (
        LlamaConnectionError,
        LlamaTimeoutError,
        ModelNotFoundError,
        OverloadedError,
        RejectedInputError,
        ServerError,
        TritonLlamaError,
    )
    from triton_llama.sampling_params import SamplingParams
    from triton_llama.status import ModelConfig, ServerStatus

__all__ = [
    "AsyncCompletionStream",
    "AsyncLlamaClient",
    "Completion",
    "CompletionStream",
    "LlamaClient",
    "LlamaConnectionError",
    "LlamaTimeoutError",
    "ModelConfig",
    "ModelNotFoundError",
    "OverloadedError",
    "Piece",
    "RejectedInputError",
    "SamplingParams",
    "ServerError",
    "ServerStatus",
    "TritonLlamaError",
]

_MODULES = {
    "AsyncCompletionStream": "completion",
    "AsyncLlamaClient": "async_client",
    "Completion": "completion",
    "CompletionStream": "completion",
    "LlamaClient": "client",
    "ModelConfig": "status",
    "Piece": "completion",
    "SamplingParams": "sampling_params",
    "ServerStatus": "status",
}
"""The module of each name; the others are errors."""

# Type checkers take the names from the imports above; with this function they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import one of the public names and cache it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
