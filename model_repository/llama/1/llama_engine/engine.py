"""The decode loop: prompts into slots, one step per token for all rows, rows come and go between two steps.

A row's tokens depend on that row alone: its prompt, its parameters, its seed. The engine knows rows, slots and steps;
which prompts are read next is the prefill's business, text the tokenizer's, bounds the request parser's, when a row
enters the scheduler's, and Triton nobody's. Rows that decode sit in the first slots, so that a step's cache is a view.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llama_engine.api.defaults import GenerationDefaults
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.choosing import Choosing
from llama_engine.errors import GenerationError, InvalidSettings
from llama_engine.model.cuda_graphs import Capture, graph_count
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import plan_memory
from llama_engine.model.model_runner import ModelRunner
from llama_engine.prefill import Prefill
from llama_engine.rows import FAILURE, Outcome, Row, failure, named
from llama_engine.sampling.sampler import FAILED, Sampler
from llama_engine.settings import Settings
from llama_engine.text.bad_words import BadWords
from llama_engine.text.stop_checker import StopChecker

_log = logging.getLogger(__name__)


@dataclass
class Step:
    """What one step did.

    started: rows that have chosen their first token. ended: rows that have their outcome now. decoded: rows in the
    decode pass. chosen: tokens that rows got. prefilled: prompt tokens read, padding included. errors: computations
    that failed.
    """

    started: Sequence[Row]
    ended: list[Row]
    decoded: int = 0
    chosen: int = 0
    prefilled: int = 0
    errors: int = 0

    @property
    def failed(self) -> bool:
        """Whether nothing but failures came of it: nobody got a token, and a computation failed or a row ended."""
        return not self.chosen and bool(self.errors or self.ended)


class Engine:
    """Decodes rows on one model. Not thread-safe, but for `row`: one thread at a time calls the rest."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, slots: int) -> None:
        """Plan the memory and allocate it. Raises OutOfMemoryPlan, with the figures, if it doesn't fit."""
        config = checkpoint.config
        self._device = checkpoint.info.device
        self._vocabulary = checkpoint.tokenizer.vocabulary
        self.max_model_len = checkpoint.max_model_len
        self.defaults = GenerationDefaults.from_config(
            checkpoint.generation_config, settings.default_max_tokens, config.vocab_size
        )
        if slots < 1:
            raise InvalidSettings(f"slots is {slots}; it must be at least 1 (max_batch_size, if it isn't set)")
        self.plan = plan_memory(checkpoint, settings, slots)
        self.plan.check()
        self._model = ModelRunner(checkpoint, self.plan.shape)
        self._sampler = Sampler(slots, config.vocab_size, sorted(self.defaults.end_tokens), self._device)
        self._prefill = Prefill(self._model, slots, settings.prefill_tokens, self._note_error)
        self._choosing = Choosing(self._model, self._sampler, self._device, self._note_error)
        self._wants_graphs = settings.cuda_graphs == "on"
        self._checkpoint = checkpoint
        self._rows: list[Row] = []
        self._step = Step([], [])

    @property
    def slots(self) -> int:
        """Rows that can be in the engine together."""
        return self.plan.shape.slots

    @property
    def taken(self) -> int:
        """Rows that are in the engine."""
        return len(self._rows) + len(self._prefill)

    def describe_steps(self) -> str:
        """Return in a line how decode steps are computed."""
        graphs = f"replayed as {graph_count(self.plan.shape)} CUDA graphs" if self.replays else "launched"
        kernels = self._checkpoint.kernels.describe() if self._device.type == "cuda" else "on the CPU"
        return f"decode steps: {kernels}, {graphs}"

    @property
    def replays(self) -> bool:
        """Whether decode steps are CUDA graphs."""
        return self._choosing.replays

    def row(self, request: GenerationRequest, name: str = "") -> Row:
        """Make what the engine keeps of a request. Any thread may: what costs time here doesn't hold up a step.

        name: what the log calls it, in one printable line.
        """
        transcript = StopChecker(
            min_tokens=request.min_tokens,
            max_tokens=request.max_tokens,
            stop_words=request.stop_words,
            end_tokens=self.defaults.end_tokens,
        )
        banned = BadWords(request.bad_words, self._vocabulary, self._device) if request.bad_words else None
        return Row(request, transcript, banned, name=name)

    def enter(self, row: Row) -> None:
        """Take a row in, behind those that came before; there must be a free slot."""
        assert self.taken < self.slots, "no slot is free"
        self._prefill.enter(row)

    def drop(self, row: Row) -> None:
        """Give a row up, without an outcome; its slot is free at once. If that raises, all rows have been given up."""
        if self._prefill.drop(row) or row not in self._rows:
            return
        try:
            self._retire(self._rows.index(row))
        except Exception as error:
            # Half retired, every slot could be another row's than the sampler thinks.
            self._note_error(error, "giving a slot up")
            self._abandon()
            raise

    @torch.inference_mode()
    def step(self) -> Step:
        """Read prompts, at most so many tokens, and choose the next token of every row whose prompt is read.

        Never raises: a computation that fails is tried again on parts of its rows, and a row that can't be computed
        even alone gets a GenerationError. What can't be isolated fails every row.
        """
        self._step = Step([], [])
        if self._device.type == "cuda":
            # PyTorch goes by the tensors' device, but what the Triton language launches goes by the thread's.
            torch.cuda.set_device(self._device)
        try:
            self._advance()
        except Exception as error:  # noqa: BLE001 - whatever it was, every row must get an answer
            self._note_error(error, f"a step over {self.taken} rows")
            self._abandon()
        return self._step

    def complete(self, requests: Sequence[GenerationRequest]) -> list[Outcome]:
        """Run the requests to their ends and return their outcomes in order."""
        rows = [self.row(request) for request in requests]
        waiting = deque(rows)
        while waiting or self.taken:
            while waiting and self.taken < self.slots:
                self.enter(waiting.popleft())
            self.step()
        return [row.outcome for row in rows if row.outcome is not None]

    def prove(self) -> None:
        """Generate through prefill and a decode step; raises GenerationError if that doesn't work, or what a
        kernel raises at its first use.

        On a GPU with the longest prompt there can be, so that the plan's reserve is tried and not only computed; on a
        CPU, where that could take minutes, with one token.
        """
        if self._device.type == "cuda":
            with torch.inference_mode():
                self._model.rehearse()
        self.record_graphs()
        width = max(self.max_model_len - 2, 1) if self._device.type == "cuda" else 1
        # Two tokens are one step after the prefill; a context of two tokens has room for one.
        count = min(2, self.max_model_len - width)
        request = GenerationRequest(prompt="", prompt_tokens=(0,) * width, max_tokens=count, min_tokens=count)
        outcome = self.complete([request])[0]
        if isinstance(outcome, GenerationError):
            raise outcome

    def record_graphs(self, capture: Capture | None = None) -> None:
        """Let decode steps be CUDA graphs from here on, if the settings ask for it and it can be; before any row is in.

        capture: how; None is CUDA's.
        """
        assert not self.taken, "rows are in the engine"
        if self._wants_graphs:
            self._choosing.record_graphs(self._checkpoint, self.plan.shape, capture)

    def _advance(self) -> None:
        decoding = len(self._rows)
        entered = self._prefill.read(first=decoding)
        self._step.prefilled = entered.tokens
        for row, exhausted in entered.failed:
            self._end(row, failure(row, exhausted))
        if entered.rows:
            # First: if what follows raises, these rows must be where `_abandon` looks for them.
            self._rows += entered.rows
            self._model.seat(decoding, [row.length for row in entered.rows])
            self._sampler.admit([row.request for row in entered.rows])
        if not self._rows:
            return
        tokens = self._choosing.next_tokens(self._rows, decoding, entered.hidden)
        self._step.decoded = decoding
        for row in self._rows[:decoding]:
            row.length += 1
        # The host has to know the tokens: here it waits for the device; before, it only hands small tensors over.
        chosen = tokens.tolist()
        # Backwards, so that the row that moves into a freed slot is one that has been looked at already.
        for slot in reversed(range(len(self._rows))):
            self._take(slot, chosen[slot])
        self._step.started = [row for row in entered.rows if not isinstance(row.outcome, GenerationError)]

    def _take(self, slot: int, token: int) -> None:
        """Give a row its next token, and let it go if it ends with it."""
        row = self._rows[slot]
        if token == FAILED:
            self._model.wipe(slot, slot + 1)
            self._end(row, row.outcome or GenerationError("the model's logits for this request were not finite"))
        else:
            try:
                piece = self._vocabulary.token_bytes[token]
                self._step.chosen += 1
                if row.transcript.add(token, piece):
                    self._end(row, row.completion())
                elif row.banned is not None:
                    row.banned.append(piece)
            except Exception as error:  # noqa: BLE001 - the row must get an answer, and the others go on
                self._note_error(error, f"taking token {token} of {named([row])}")
                self._end(row, FAILURE)
        if row.outcome is not None:
            self._retire(slot)

    def _end(self, row: Row, outcome: Outcome) -> None:
        row.outcome = outcome
        self._step.ended.append(row)

    def _retire(self, slot: int) -> None:
        """Give a slot up: the last row moves into it, so that the rows in use stay the first ones."""
        last = self._rows.pop()
        # First: if what follows raises, every row must still be in the list.
        if slot < len(self._rows):
            self._rows[slot] = last
            self._model.move(len(self._rows), slot, last.length)
        self._sampler.retire(slot)

    def _note_error(self, error: Exception, what: str) -> bool:
        """Count and log a failed computation; return whether the device's memory was exhausted."""
        self._step.errors += 1
        _log.error("%s failed", what, exc_info=error)
        exhausted = isinstance(error, torch.OutOfMemoryError)
        if exhausted:
            # The frames it went through still hold the pass's tensors; and what the allocator keeps in pieces may be
            # enough in one.
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()
        return exhausted

    def _abandon(self) -> None:
        """Answer every row with a failure and clear the slots."""
        rows, self._rows = [*self._rows, *self._prefill.clear()], []
        self._sampler.clear()
        for row in rows:
            if row not in self._step.ended:
                self._end(row, FAILURE)
        try:
            self._model.wipe(0, self.slots)
        except Exception as error:  # noqa: BLE001 - a device that can't even do this fails the next rows in their turn
            self._note_error(error, "clearing the slots")
