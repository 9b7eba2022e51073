"""The model with faults: what a prompt says goes wrong, goes wrong when that prompt's row is there."""

from __future__ import annotations

from collections.abc import Sequence

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim
import torch
from llama_engine.api.request_parser import GenerationRequest, RawInputs, RequestParser
from llama_engine.engine import Engine, Step
from llama_engine.model.loader import Checkpoint
from llama_engine.observability.stats import Meter
from llama_engine.rows import Row
from llama_engine.scheduler import Scheduler
from llama_engine.settings import Settings
from llama_engine.tickets import Ticket
from real_model import TritonPythonModel

__all__ = ["TritonPythonModel"]

SECRET = "cuda:0 is on fire at 10.0.0.1"
LARGEST_PASS = 64
"""Prompt tokens, padding included, for which there is memory while a prompt says "fault memory"."""

_had: set[tuple[str, Row]] = set()


def _fail(row: Row, fault: str, after: int = 0) -> None:
    """Raise if the row's prompt says so and it has `after` tokens."""
    if f"fault {fault}" in row.request.prompt and row.transcript.num_tokens >= after:
        raise RuntimeError(SECRET)


def _fail_once(row: Row, fault: str, after: int = 0) -> None:
    if (fault, row) not in _had:
        try:
            _fail(row, fault, after)
        except RuntimeError:
            _had.add((fault, row))
            raise


class FaultyEngine(Engine):
    """An engine whose passes fail."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, slots: int) -> None:
        super().__init__(checkpoint, settings, slots)
        model = self._model
        # Tokens are all that a pass over prompts is told.
        texts = checkpoint.tokenizer.pretrained.decode
        prefill, chunk, step, logits = model.prefill, model.prefill_chunk, model.step, model.logits
        self._poisoned: list[int] = []

        def fail_to_prefill(first: int, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
            said = " ".join(str(texts(list(prompt))) for prompt in prompts)
            if "fault prefill" in said:
                raise RuntimeError(SECRET)
            if "fault memory" in said and max(map(len, prompts)) * len(prompts) > LARGEST_PASS:
                raise torch.OutOfMemoryError(SECRET)
            return prefill(first, prompts)

        def fail_in_a_chunk(slot: int, tokens: Sequence[int], start: int) -> torch.Tensor:
            if "fault chunk" in str(texts(list(tokens))):
                raise RuntimeError(SECRET)
            return chunk(slot, tokens, start)

        def fail_to_step(first: int, last: int, longest: int) -> torch.Tensor:
            for row in self._rows[first:last]:
                _fail(row, "step", after=3)
                if len(self._rows) > 1:
                    _fail_once(row, "hiccup", after=6)
            hidden = step(first, last, longest)
            for index, row in enumerate(self._rows[first:last]):
                if "fault nan" in row.request.prompt and row.transcript.num_tokens >= 3:
                    hidden[index] = torch.nan
            return hidden

        def fail_in_the_head(hidden: torch.Tensor) -> torch.Tensor:
            # Once, and for all rows that are there: what works in halves afterwards. A row alone has no halves.
            for row in self._rows if len(self._rows) > 1 else ():
                _fail_once(row, "head", after=6)
            return logits(hidden)

        # Changed on the one object: a class of its own would have to be put in its place by the engine.
        for name, faulty in (
            ("prefill", fail_to_prefill),
            ("prefill_chunk", fail_in_a_chunk),
            ("step", fail_to_step),
            ("logits", fail_in_the_head),
        ):
            setattr(model, name, faulty)

    def row(self, request: GenerationRequest, name: str = "") -> Row:
        row = super().row(request, name)
        add, take = row.transcript.add, row.transcript.next_delta

        def fail_to_add(token: int, piece: bytes) -> bool:
            _fail(row, "transcript", after=3)
            return add(token, piece)

        def fail_to_take() -> str:
            _fail(row, "piece", after=3)
            return take()

        for name, faulty in (("add", fail_to_add), ("next_delta", fail_to_take)):
            setattr(row.transcript, name, faulty)
        return row


_report, _ended, _parse = Scheduler._report, Meter.ended, RequestParser.parse
_is_cancelled = real_model._Answer.is_cancelled


def _fail_to_report(self: Scheduler, step: Step) -> None:
    for row in self._running:
        _fail_once(row, "report", after=3)
    _report(self, step)


def _fail_to_count(self: Meter, ticket: Ticket) -> None:
    _fail_once(ticket.row, "count")
    _ended(self, ticket)


def _fail_to_parse(self: RequestParser, inputs: RawInputs) -> list[GenerationRequest]:
    requests = _parse(self, inputs)
    if any("fault parse" in request.prompt for request in requests):
        raise RuntimeError(SECRET)
    return requests


def _fail_to_ask(self: real_model._Answer) -> bool:
    for ticket in self.tickets:
        _fail(ticket.row, "question")
    return bool(_is_cancelled(self))


for owner, method, faulty_method in (
    (Scheduler, "_report", _fail_to_report),
    (Meter, "ended", _fail_to_count),
    (RequestParser, "parse", _fail_to_parse),
    (real_model._Answer, "is_cancelled", _fail_to_ask),
):
    setattr(owner, method, faulty_method)
real_model.Engine = FaultyEngine
