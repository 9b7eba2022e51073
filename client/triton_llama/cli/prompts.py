"""Where prompts come from: the argument, stdin or a file. Text must be UTF-8. Sends nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
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
        click.UsageError: nothing was given and stdin is a terminal, or stdin isn't UTF-8.
    """
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("no PROMPT given, and stdin is a terminal", click.get_current_context(silent=True))
    text = _decode(sys.stdin.buffer.read(), "stdin")
    return text.removesuffix("\n").removesuffix("\r")


def read_jobs(path: str, params: SamplingParams) -> list[Job]:
    """Read a prompts file (`-` is stdin): one prompt a line, blank lines skipped.

    If its name ends in `.jsonl`, each line is an object with `prompt` and any fields of `SamplingParams`, which win
    over `params`.

    Raises:
        click.UsageError: the file isn't UTF-8 or a line isn't what it must be; it names the line.
    """
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    name = "stdin" if path == "-" else path
    structured = path.lower().endswith(".jsonl")
    return [
        _structured(f"{name} line {number}", number, line, params) if structured else Job(number, line, params)
        for number, line in _lines(_decode(raw, name))
    ]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not splitlines(): that also splits at characters that may stand inside a prompt.
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.removesuffix("\r")
        if stripped.strip():
            yield number, stripped


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
