"""Prompts on their way into slots: which are read next, how many at once, and what happens if that fails.

Prompts are read in order of arrival, one pass before each decode step and at most `budget` padded tokens in it, which
bounds how long the decoding rows wait. Prompts that fit are read together, straight into the next slots. A longer one
is read in chunks into the last slot, which nobody else can need (a row is counted from the moment it enters), and moves
up once it is whole. Knows nothing about sampling; who is seated where is the engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from llama_engine.model.model_runner import ModelRunner
from llama_engine.rows import Row, named


@dataclass(frozen=True)
class Prefilled:
    """What one pass over prompts came to.

    rows: whose prompts lie whole in the next slots, in order. hidden: of their last tokens, [rows, hidden] in all.
    tokens: prompt tokens read, padding included. failed: the rows that can't be read even alone, and whether it was the
    device's memory that they exhausted.
    """

    rows: list[Row] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    failed: list[tuple[Row, bool]] = field(default_factory=list)


class Prefill:
    """The rows whose prompts are not read yet."""

    def __init__(self, model: ModelRunner, slots: int, budget: int, on_error: Callable[[Exception, str], bool]) -> None:
        """`on_error` is told of every pass that fails, also of those that succeed in parts later.

        It returns whether the device's memory was exhausted.
        """
        self._model = model
        self._last_slot = slots - 1
        self._budget = budget
        self._on_error = on_error
        self._entering: deque[Row] = deque()
        # The one whose beginning lies in the last slot.
        self._partial: Row | None = None
        # Those that a pass is reading; only if it raises is anybody left in here.
        self._reading: list[Row] = []

    def __len__(self) -> int:
        return len(self._entering) + (self._partial is not None)

    def enter(self, row: Row) -> None:
        """Take a row in, behind those that came before."""
        self._entering.append(row)

    def drop(self, row: Row) -> bool:
        """Give a row up; return whether it was here."""
        if row is self._partial:
            self._partial = None
        elif row in self._entering:
            self._entering.remove(row)
        else:
            return False
        return True

    def clear(self) -> list[Row]:
        """Give all rows up, and return them."""
        rows = [*([] if self._partial is None else [self._partial]), *self._reading, *self._entering]
        self._entering.clear()
        self._reading = []
        self._partial = None
        return rows

    def read(self, first: int) -> Prefilled:
        """Run one pass over the next prompts, if there are any; those that get whole lie in the slots `first` …"""
        if self._partial is None and self._entering:
            if self._entering[0].unread <= self._budget:
                self._reading = self._next_group()
                entered = self._read_whole(self._reading, first)
                self._reading = []
                return entered
            self._partial = self._entering.popleft()
        return Prefilled() if self._partial is None else self._read_on(self._partial, first)

    def _next_group(self) -> list[Row]:
        """Take the rows that are read together: in order, while their padded prompts fit."""
        group: list[Row] = []
        width = 0
        while self._entering:
            width = max(width, self._entering[0].unread)
            if width * (len(group) + 1) > self._budget:
                break
            group.append(self._entering.popleft())
        return group

    def _read_whole(self, group: list[Row], first: int) -> Prefilled:
        """Read whole prompts; if that fails, each half by itself, down to the row that can't be read even alone."""
        prompts = [row.request.prompt_tokens for row in group]
        width, count = max(map(len, prompts)), len(group)
        try:
            hidden = self._model.prefill(first, prompts)
        except Exception as error:  # noqa: BLE001 - the rows must get an answer, and the others go on
            exhausted = self._on_error(error, f"reading the prompts of {named(group)}, of up to {width} tokens,")
        else:
            for row, prompt in zip(group, prompts, strict=True):
                row.length = len(prompt)
            return Prefilled(group, [hidden], width * count)
        # Out here and not in the handler, where the exception would hold what the failed pass had allocated.
        self._model.wipe(first, first + count)
        if count == 1:
            return Prefilled(tokens=width, failed=[(group[0], exhausted)])
        one = self._read_whole(group[: count // 2], first)
        other = self._read_whole(group[count // 2 :], first + len(one.rows))
        return Prefilled(
            one.rows + other.rows,
            one.hidden + other.hidden,
            width * count + one.tokens + other.tokens,
            one.failed + other.failed,
        )

    def _read_on(self, row: Row, first: int) -> Prefilled:
        """Read the next chunk of the prompt that is read in chunks."""
        slot = self._last_slot
        chunk = row.request.prompt_tokens[row.length : row.length + self._budget]
        try:
            hidden = self._model.prefill_chunk(slot, chunk, row.length)
            row.length += len(chunk)
            if row.unread:
                return Prefilled(tokens=len(chunk))
            if first != slot:
                self._model.move(slot, first, row.length)
        except Exception as error:  # noqa: BLE001 - the row must get an answer, and the others go on
            size = len(row.request.prompt_tokens)
            exhausted = self._on_error(error, f"reading {len(chunk)} of the {size} prompt tokens of {named([row])}")
            self._model.wipe(slot, slot + 1)
            self._partial = None
            return Prefilled(tokens=len(chunk), failed=[(row, exhausted)])
        self._partial = None
        return Prefilled([row], [hidden], len(chunk))
