"""Client of a Llama served by Triton: `LlamaClient`, its asyncio twin, and what goes in and comes out.

The command line is in `triton_llama.cli`, the probe of orchestrators in `triton_llama.health`; the error tree is drawn
in `triton_llama.errors`. The names below are imported when they are first asked for (PEP 562): the probe is part of the
package, and runs where neither tritonclient nor numpy are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_llama.async_client import AsyncLlamaClient
    from triton_llama.client import LlamaClient
    from triton_llama.completion import Completion
    from triton_llama.completion_stream import AsyncCompletionStream, CompletionStream
    from triton_llama.errors import (
        LlamaConnectionError,
        LlamaTimeoutError,
        ModelNotFoundError,
        OverloadedError,
        RejectedInputError,
        ServerError,
        TritonLlamaError,
    )
    from triton_llama.piece import Piece
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
    "AsyncCompletionStream": "completion_stream",
    "AsyncLlamaClient": "async_client",
    "Completion": "completion",
    "CompletionStream": "completion_stream",
    "LlamaClient": "client",
    "ModelConfig": "status",
    "Piece": "piece",
    "SamplingParams": "sampling_params",
    "ServerStatus": "status",
}
"""Where a name is; what isn't here is an error."""

# Type checkers know the names from the imports above, and would take any name for one of an unknown type here.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import one of the public names, and keep it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
