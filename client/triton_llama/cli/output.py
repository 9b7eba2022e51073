"""Output of the command line: completions as text or JSON lines, failures as one line and an exit code each."""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

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


def as_json(fields: Mapping[str, object]) -> str:
    """Return fields as one line of JSON."""
    return json.dumps(fields, ensure_ascii=False)


def on_one_line(text: str) -> str:
    r"""Return a text with its line breaks as `\n` and `\r`, and its backslashes doubled so that this is reversible."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
