"""The model that breaks for good: after a prompt that asks for it every pass fails, as after a device fault."""

from __future__ import annotations

import math
from collections import abc

import real_model  # type: ignore[import-not-found]  # the name that model.py has beside a shim
import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import ResponseSink, Sequence
from llama_engine.settings import Settings
from real_model import TritonPythonModel

__all__ = ["TritonPythonModel"]

WORDS = "break for good"


class BreakingEngine(Engine):
    """An engine whose passes fail from the moment that a prompt with these words has come."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, slots: int) -> None:
        super().__init__(checkpoint, settings, slots)
        self._broken = False
        model = self._model
        prefill, decode = model.prefill, model.decode

        def fail_to_prefill(first: int, prompts: abc.Sequence[abc.Sequence[int]]) -> torch.Tensor:
            self._check()
            return prefill(first, prompts)

        def fail_to_decode(first: int, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
            self._check()
            return decode(first, tokens, positions, span)

        # Changed on the one object: a class of its own would have to be put in its place by the engine.
        for name, faulty in (("prefill", fail_to_prefill), ("decode", fail_to_decode)):
            setattr(model, name, faulty)

    def sequence(
        self,
        request: GenerationRequest,
        name: str = "",
        sink: ResponseSink | None = None,
        stream: bool = False,
        deadline: float = math.inf,
    ) -> Sequence:
        self._broken = self._broken or WORDS in request.prompt
        return super().sequence(request, name, sink, stream, deadline)

    def _check(self) -> None:
        if self._broken:
            raise RuntimeError("an illegal memory access was encountered")


real_model.Engine = BreakingEngine
