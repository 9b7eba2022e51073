"""Output of the command line: completions as text or JSON lines, failures as one line and an exit code each."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from triton_llama.completion import AsyncCompletionStream, Chunk, Completion
from triton_llama.errors import (
    LlamaConnectionError,
    LlamaTimeoutError,
    OverloadedError,
    RejectedInputError,
    TritonLlamaError,
)

OTHER = 1
USAGE = 2
SERVER_ERROR = 7
INTERRUPTED = 130
_EXIT_CODES = {LlamaConnectionError: 3, LlamaTimeoutError: 4, RejectedInputError: 5, OverloadedError: 6}


def exit_code(error: TritonLlamaError) -> int:
    """Return the exit code of an error."""
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), SERVER_ERROR)


def report(message: str) -> None:
    """Write an error to stderr, in one line."""
    click.echo(f"triton-llama: error: {' '.join(message.split())}", err=True)


def as_json(completion: Completion) -> str:
    """Return a completion's fields as one line of JSON."""
    return json.dumps(asdict(completion), ensure_ascii=False)


def chunk_as_json(chunk: Chunk, stream: AsyncCompletionStream) -> str:
    """Return a chunk's fields as one line of JSON, with its stream's request id and seed."""
    return json.dumps({**asdict(chunk), "request_id": stream.request_id, "seed": stream.seed}, ensure_ascii=False)


def outcome_as_json(line: int, result: Completion | TritonLlamaError) -> str:
    """Return the prompt's `line` in its file with a completion's fields, or with `error` (`type`, `message`)."""
    if isinstance(result, TritonLlamaError):
        fields: dict[str, object] = {"error": {"type": type(result).__name__, "message": str(result)}}
    else:
        fields = asdict(result)
    return json.dumps({"line": line, **fields}, ensure_ascii=False)


def on_one_line(text: str) -> str:
    r"""Return a text with its line breaks as `\n` and `\r`, and its backslashes doubled so that this is reversible."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
