"""Prompts from the argument, stdin or a file, which must be UTF-8."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import click

from triton_llama.sampling_params import SamplingParams

_FIELDS = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Job:
    """One prompt of a file."""

    line: int
    """Its line, from 1."""
    prompt: str
    params: SamplingParams


def read_prompt(argument: str | None) -> str:
    """Return the argument, or stdin without its last line break if the argument is absent or `-`.

    Raises:
        click.UsageError: no argument and stdin is a terminal, or stdin isn't UTF-8.
    """
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("no PROMPT given, and stdin is a terminal", click.get_current_context(silent=True))
    return _decode(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")


def read_jobs(path: str, params: SamplingParams) -> list[Job]:
    """Read a prompts file (`-` is stdin): one prompt a line, blank lines skipped.

    In a file `*.jsonl` each line is an object with `prompt` and fields of `SamplingParams`, which override `params`.

    Raises:
        click.UsageError: the file isn't UTF-8, or a line is malformed; the message names the line.
    """
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    name = "stdin" if path == "-" else path
    structured = path.lower().endswith(".jsonl")
    jobs = []
    # Not splitlines(), which also splits at characters that a prompt may contain.
    for number, text in enumerate(_decode(raw, name).split("\n"), start=1):
        line = text.removesuffix("\r")
        if line.strip():
            where = f"{name} line {number}"
            jobs.append(_structured(where, number, line, params) if structured else Job(number, line, params))
    return jobs


def _structured(where: str, number: int, line: str, params: SamplingParams) -> Job:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise click.UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise click.UsageError(f'{where} must be an object with a string "prompt"')
    prompt = entry.pop("prompt")
    unknown = sorted(entry.keys() - _FIELDS)
    if unknown:
        known = ", ".join(["prompt", *sorted(_FIELDS)])
        raise click.UsageError(f"{where} has an unknown key {unknown[0]!r}, must be one of {known}")
    return Job(number, prompt, params.with_options(**entry))


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} is not UTF-8 at byte {error.start}") from error
