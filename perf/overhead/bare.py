"""The engine without a server: the same requests, in one thread, all submitted at the start.

Includes tokenization, as in the server; no queue, no scheduler, no responses. Having every request from the start
corresponds to a server at which requests always wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.loader import choose_device, load_checkpoint
from llama_engine.sequence import Completion
from llama_engine.settings import Settings

from perf.load.protocols import Request
from perf.overhead import passes
from perf.overhead.probes import probes
from perf.overhead.stopwatch import Node, Stopwatch

SPAN = 64
"""max_model_len is a multiple of it."""


@dataclass(frozen=True)
class Run:
    """One run over all requests. processor_seconds: of this process."""

    seconds: float
    processor_seconds: float
    output_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


@dataclass(frozen=True)
class Split:
    """A run with the stopwatch on. whole: its parts. passes: the passes of its model."""

    run: Run
    whole: Node
    passes: Sequence[passes.Pass]


class BareEngine:
    """An engine with its checkpoint, and the requests of every run."""

    def __init__(self, folder: Path, quantization: str, slots: int, requests: Sequence[Request]) -> None:
        parameters = {"model": str(folder), "quantization": quantization}
        device = choose_device("auto", 0 if torch.cuda.is_available() else None)
        loaded = load_checkpoint(Settings.parse(parameters, {}), device)
        longest = max(len(loaded.tokenizer.encode(one.prompt)) + one.output_tokens for one in requests)
        self.max_model_len = min(-(-longest // SPAN) * SPAN, loaded.max_model_len)
        self.checkpoint = replace(loaded, max_model_len=self.max_model_len)
        self.engine = Engine(self.checkpoint, Settings.parse(parameters, {}), slots)
        self._requests = requests

    def run(self, count: int | None = None) -> Run:
        """Answer the first `count` requests, or all. Raises RuntimeError if one isn't completed as asked."""
        requests = self._requests[:count]
        began, worked = time.perf_counter(), time.process_time()
        encode = self.checkpoint.tokenizer.encode
        outcomes = self.engine.generate(
            [
                GenerationRequest(
                    prompt=request.prompt,
                    prompt_tokens=encode(request.prompt),
                    max_tokens=request.output_tokens,
                    min_tokens=request.output_tokens,
                )
                for request in requests
            ]
        )
        run = Run(
            time.perf_counter() - began,
            time.process_time() - worked,
            sum(request.output_tokens for request in requests),
        )
        for number, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            if not isinstance(outcome, Completion) or outcome.num_output_tokens != request.output_tokens:
                raise RuntimeError(f"request {number} asked for {request.output_tokens} tokens and got {outcome!r}")
        return run

    def split(self) -> Split:
        """Answer all requests with the stopwatch on, and record the passes."""
        stopwatch = Stopwatch("bare engine", self.settle)
        stopwatch.whole.rest = "loop, rows and reading the tokens"
        # Recording is outside: its cost counts to the loop and not to the passes.
        with stopwatch.on(probes(self.checkpoint.model)), passes.recording() as noted, stopwatch.running():
            run = self.run()
        return Split(run, stopwatch.whole, noted)

    def through_slots(self, noted: Sequence[passes.Pass]) -> float:
        """Return the seconds of these passes through the model runner alone."""
        return passes.through_slots(self.checkpoint, self.engine.plan.shape, noted, self.settle)

    def through_forward(self, noted: Sequence[passes.Pass]) -> float:
        """Return the seconds of these passes through transformers' forward alone."""
        return passes.through_forward(self.checkpoint, self.engine.plan.shape, noted, self.settle)

    @property
    def settle(self) -> Callable[[], None]:
        """Wait for the device's outstanding work; a CPU has none when a call returns."""
        return torch.cuda.synchronize if self.checkpoint.info.device.type == "cuda" else _nothing


def _nothing() -> None:
    pass
