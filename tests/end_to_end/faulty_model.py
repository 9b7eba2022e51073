"""The model with faults: what a prompt says goes wrong, goes wrong when that prompt's row is there."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim
import torch
from llama_engine.engine.engine import Engine
from llama_engine.engine.sequence import Sequence
from llama_engine.model.loader import LoadedModel
from llama_engine.model.model_runner import TokenChunk
from llama_engine.request.parser import RequestParser
from llama_engine.request.raw_values import RawInputs, RequestValues
from llama_engine.settings import Settings

SECRET = "cuda:0 is on fire at 10.0.0.1"


def _before(owner: object, method: str, check: Callable[..., None]) -> None:
    """Have `check` called before a method, with its positional arguments; what it raises, the method raises."""
    real = getattr(owner, method)

    def checked(*arguments: object, **options: object) -> object:
        check(*arguments)
        return real(*arguments, **options)

    setattr(owner, method, checked)


def _fail(row: Sequence, fault: str, after: int = 0) -> None:
    """Raise if the prompt names the fault and the row has `after` tokens."""
    if f"fault {fault}" in row.request.prompt and row.num_output_tokens >= after:
        raise RuntimeError(SECRET)


class FaultyEngine(Engine):
    """An engine whose decode passes fail; after "fault for good" every prompt fails, too, as after a device fault."""

    def __init__(self, checkpoint: LoadedModel, settings: Settings, slots: int) -> None:
        super().__init__(checkpoint, settings, slots)
        self._broken = False
        # Changed on the one object: a class of its own would have to be put in its place by the engine.
        _before(self._model, "run_chunks", self._check_chunks)
        _before(self._model, "decode", self._check_decode)

    def _check_chunks(self, chunks: abc.Sequence[TokenChunk]) -> None:
        if self._broken:
            raise RuntimeError(SECRET)

    def _check_decode(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> None:
        computed = set(slots.tolist())
        for row in [row for row in self._batch.sequences if row.kv_slot in computed]:
            self._broken = self._broken or "fault for good" in row.request.prompt
            _fail(row, "for good")
            _fail(row, "step", after=3)


def _check_parse(parser: RequestParser, inputs: RawInputs, parameters: RequestValues) -> None:
    if any(b"fault parse" in prompt for prompt in inputs["text_input"].ravel()):
        raise RuntimeError(SECRET)


_before(RequestParser, "parse", _check_parse)
TritonPythonModel = real_model.TritonPythonModel
real_model.Engine = FaultyEngine
