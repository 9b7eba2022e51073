"""The model with faults: what a prompt says goes wrong, goes wrong when that prompt's row is there."""

from __future__ import annotations

import math
from collections import abc

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim
import torch
from llama_engine.api.request_parser import GenerationRequest, RawInputs, RequestParser
from llama_engine.engine import Engine, StepResult
from llama_engine.model.loader import Checkpoint
from llama_engine.observability.stats import Stats
from llama_engine.scheduler import Scheduler
from llama_engine.sequence import ResponseSink, Sequence
from llama_engine.settings import Settings
from llama_engine.triton.requests import Response
from real_model import TritonPythonModel

__all__ = ["TritonPythonModel"]

SECRET = "cuda:0 is on fire at 10.0.0.1"
LARGEST_PASS = 64
"""Prompt tokens, padding included, for which there is memory while a prompt says "fault memory"."""

_had: set[tuple[str, Sequence]] = set()


def _fail(row: Sequence, fault: str, after: int = 0) -> None:
    """Raise if the prompt names the fault and the row has `after` tokens."""
    if f"fault {fault}" in row.request.prompt and row.stop_checker.num_tokens >= after:
        raise RuntimeError(SECRET)


def _fail_once(row: Sequence, fault: str, after: int = 0) -> None:
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
        # A prefill pass gets tokens only, not prompts.
        texts = checkpoint.tokenizer.pretrained.decode
        prefill, chunk, decode, logits = model.prefill, model.prefill_chunk, model.decode, model.logits

        def fail_to_prefill(first: int, prompts: abc.Sequence[abc.Sequence[int]]) -> torch.Tensor:
            said = " ".join(str(texts(list(prompt))) for prompt in prompts)
            if "fault prefill" in said:
                raise RuntimeError(SECRET)
            if "fault memory" in said and max(map(len, prompts)) * len(prompts) > LARGEST_PASS:
                raise torch.OutOfMemoryError(SECRET)
            return prefill(first, prompts)

        def fail_in_a_chunk(slot: int, tokens: abc.Sequence[int], start: int) -> torch.Tensor:
            if "fault chunk" in str(texts(list(tokens))):
                raise RuntimeError(SECRET)
            return chunk(slot, tokens, start)

        def fail_to_decode(first: int, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
            rows = self._batch.sequences[first : first + len(tokens)]
            for row in rows:
                _fail(row, "step", after=3)
                if len(self._batch) > 1:
                    _fail_once(row, "hiccup", after=6)
            hidden = decode(first, tokens, positions, span)
            for index, row in enumerate(rows):
                if "fault nan" in row.request.prompt and row.stop_checker.num_tokens >= 3:
                    hidden[index] = torch.nan
            return hidden

        def fail_in_the_head(hidden: torch.Tensor) -> torch.Tensor:
            # Once, and for all rows that are there: what works in halves afterwards. A row alone has no halves.
            for row in self._batch.sequences if len(self._batch) > 1 else ():
                _fail_once(row, "head", after=6)
            return logits(hidden)

        # Changed on the one object: a class of its own would have to be put in its place by the engine.
        for name, faulty in (
            ("prefill", fail_to_prefill),
            ("prefill_chunk", fail_in_a_chunk),
            ("decode", fail_to_decode),
            ("logits", fail_in_the_head),
        ):
            setattr(model, name, faulty)

    def sequence(
        self,
        request: GenerationRequest,
        name: str = "",
        sink: ResponseSink | None = None,
        stream: bool = False,
        deadline: float = math.inf,
    ) -> Sequence:
        row = super().sequence(request, name, sink, stream, deadline)
        add, take = row.stop_checker.add, row.stop_checker.next_delta

        def fail_to_add(token: int, piece: bytes) -> bool:
            _fail(row, "append", after=3)
            return add(token, piece)

        def fail_to_take() -> str:
            _fail(row, "piece", after=3)
            return take()

        for name, faulty in (("add", fail_to_add), ("next_delta", fail_to_take)):
            setattr(row.stop_checker, name, faulty)
        return row


_report, _record_finished, _parse = Scheduler._report, Stats.record_finished, RequestParser.parse
_is_cancelled = Response.is_cancelled


def _fail_to_report(self: Scheduler, step: StepResult) -> None:
    for row in self._running:
        _fail_once(row, "report", after=3)
    _report(self, step)


def _fail_to_count(self: Stats, sequence: Sequence) -> None:
    _fail_once(sequence, "count")
    _record_finished(self, sequence)


def _fail_to_parse(self: RequestParser, inputs: RawInputs) -> list[GenerationRequest]:
    requests = _parse(self, inputs)
    if any("fault parse" in request.prompt for request in requests):
        raise RuntimeError(SECRET)
    return requests


def _fail_to_ask(self: Response) -> bool:
    for sequence in self.sequences:
        _fail(sequence, "question")
    return _is_cancelled(self)


for owner, method, faulty_method in (
    (Scheduler, "_report", _fail_to_report),
    (Stats, "record_finished", _fail_to_count),
    (RequestParser, "parse", _fail_to_parse),
    (Response, "is_cancelled", _fail_to_ask),
):
    setattr(owner, method, faulty_method)
real_model.Engine = FaultyEngine
