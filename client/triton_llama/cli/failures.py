"""Failures on the command line: one line on stderr, and one exit code for each branch of the error tree."""

from __future__ import annotations

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

_EXIT_CODES: tuple[tuple[type[TritonLlamaError], int], ...] = (
    (LlamaConnectionError, 3),
    (LlamaTimeoutError, 4),
    (RejectedInputError, 5),
    (OverloadedError, 6),
    (TritonLlamaError, SERVER_ERROR),
)


def exit_code(error: TritonLlamaError) -> int:
    """Return the exit code of an error."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


def report(message: str) -> None:
    """Write one line to stderr, whatever line breaks the message has."""
    click.echo(f"triton-llama: error: {' '.join(message.split())}", err=True)
