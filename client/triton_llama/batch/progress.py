"""The progress of a batch: lines, errors, tokens per second and the time left, on stderr."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta

import click

_TERMINAL_SECONDS, _LOG_SECONDS = 0.5, 30.0
"""Between two lines: on a terminal, where each overwrites the last one, and elsewhere."""


@dataclass
class Progress:
    """Counts of a batch."""

    total: int
    answered: int
    failed: int
    tokens: int = 0
    """Generated since this run began; of embeddings, the prompts'."""
    retry_reason: str = ""
    """Why the last request is retried; empty once another one is answered."""
    reached: bool = False
    """Whether the endpoint has responded."""
    _resumed: int = field(init=False)
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._resumed = self.done

    @property
    def done(self) -> int:
        """Lines that have an answer or an error."""
        return self.answered + self.failed

    @property
    def elapsed(self) -> float:
        """Seconds since this run began."""
        return time.monotonic() - self._began

    def __str__(self) -> str:
        elapsed = self.elapsed
        rate = self.tokens / elapsed
        parts = [f"{self.done:,} of {self.total:,} lines", f"{self.failed:,} errors", f"{rate:,.0f} tokens/s"]
        if done := self.done - self._resumed:
            parts.append(f"{timedelta(seconds=round(elapsed / done * (self.total - self.done)))} left")
        if self.retry_reason:
            parts.append(f"retrying: {self.retry_reason}")
        return ", ".join(parts)

    async def show(self) -> None:
        """Print the progress periodically until cancelled."""
        terminal = sys.stderr.isatty()
        try:
            while True:
                await asyncio.sleep(_TERMINAL_SECONDS if terminal else _LOG_SECONDS)
                # A line that is wider than the terminal could not be overwritten.
                text = str(self)[: shutil.get_terminal_size().columns - 1] if terminal else str(self)
                click.echo(f"\r{text}\x1b[K" if terminal else text, nl=not terminal, err=True)
        finally:
            if terminal:
                click.echo(err=True)
