"""Client of a Llama served by Triton: `LlamaClient` and `AsyncLlamaClient`, their parameters, results and errors.

The command line is in `triton_llama.cli`; `triton_llama.errors` draws the error tree.
"""

from triton_llama.client import AsyncLlamaClient, LlamaClient
from triton_llama.completion import AsyncCompletionStream, Chunk, Completion, CompletionStream, Times
from triton_llama.errors import (
    AccessDeniedError,
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
    "AccessDeniedError",
    "AsyncCompletionStream",
    "AsyncLlamaClient",
    "Chunk",
    "Completion",
    "CompletionStream",
    "LlamaClient",
    "LlamaConnectionError",
    "LlamaTimeoutError",
    "ModelConfig",
    "ModelNotFoundError",
    "OverloadedError",
    "RejectedInputError",
    "SamplingParams",
    "ServerError",
    "ServerStatus",
    "Times",
    "TritonLlamaError",
]
