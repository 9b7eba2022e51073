"""Client of a Llama served by Triton: `LlamaClient`, its asyncio twin, and what goes in and comes out.

The command line is in `triton_llama.cli`; the error tree is drawn in `triton_llama.errors`.
"""

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
