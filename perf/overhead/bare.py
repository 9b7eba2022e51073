"""The engine without a server: the same requests, in one thread, all submitted at the start.

Includes tokenization, as in the server; no queue, no scheduler, no responses. Having every request from the start
corresponds to a server at which requests always wait.

In PyTorch, attention, norms and KV cache are parts of the forward pass, whose rest is the linear layers, the rotary
embedding, residuals and activations; the compiled kernels of a CPU fuse all of these. The rest of a pass is positions
and slots. The rest of the engine is its loop and rows and, on a GPU, waiting for the tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from llama_engine import sequence
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.kernels.cpu.forward import CpuForward
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.llama import Llama
from llama_engine.model.loader import load_checkpoint
from llama_engine.model.precision import choose_device
from llama_engine.sampling.sampler import Sampler
from llama_engine.sampling.sampling_state import SamplingState
from llama_engine.settings import Settings
from llama_engine.slot_batch import SlotBatch
from llama_engine.text.stop_checker import StopChecker
from llama_engine.text.tokenizer import Tokenizer

from perf.load.protocols import Request
from perf.overhead.passes import RUNNERS, Pass, recording
from perf.overhead.stopwatch import Node, Probe, settle, stopwatch

SPAN = 64
"""max_model_len is a multiple of it."""
TOKENIZATION = "tokenization"

_PROBES: tuple[Probe, ...] = (
    (Tokenizer, "encode", TOKENIZATION),
    *((runner, "prefill", "prefill") for runner in RUNNERS),
    *((runner, "decode", "decode steps") for runner in RUNNERS),
    *((runner, "logits", "head") for runner in RUNNERS),
    *((model, "forward", "forward pass") for model in (Llama, CpuForward)),
    (torch.nn.functional, "scaled_dot_product_attention", "attention"),
    (torch, "bmm", "attention"),
    (torch.nn.functional, "rms_norm", "norms"),
    *((KVCache, method, "KV cache") for method in ("write", "read", "gather")),
    (Sampler, "sample", "sampling"),
    (SamplingState, "set", "sampling"),
    (SamplingState, "copy", "sampling"),
    (SlotBatch, "add", "slots"),
    (SlotBatch, "advance", "slots"),
    (SlotBatch, "remove", "slots"),
    (StopChecker, "add", "stopping"),
    (sequence.Sequence, "completion", "detokenization"),
)


class FullStep(NamedTuple):
    """A step that decoded a token in every slot and prefilled nothing. positions: cached, of all rows together."""

    seconds: float
    positions: int


class Run(NamedTuple):
    """Seconds of one run over all requests, and its full steps."""

    seconds: float
    full_steps: Sequence[FullStep] = ()


class BareEngine:
    """An engine with its checkpoint, and the requests of every run."""

    def __init__(self, folder: Path, quantization: str, slots: int, requests: Sequence[Request]) -> None:
        settings = Settings.parse({"model": str(folder), "quantization": quantization}, {})
        device = choose_device("auto", 0 if torch.cuda.is_available() else None)
        loaded = load_checkpoint(settings, device)
        longest = max(len(loaded.tokenizer.encode(one.prompt)) + one.output_tokens for one in requests)
        self.max_model_len = min(-(-longest // SPAN) * SPAN, loaded.max_model_len)
        self.checkpoint = replace(loaded, max_model_len=self.max_model_len)
        self.engine = Engine(self.checkpoint, settings, slots)
        self.requests = requests
        self.settle = partial(settle, device)

    def run(self, count: int | None = None) -> Run:
        """Answer the first `count` requests, or all. Raises RuntimeError if one isn't completed as asked."""
        asked = self.requests[:count]
        began = time.perf_counter()
        encode = self.checkpoint.tokenizer.encode
        sequences = []
        for one in asked:
            tokens, prompt = one.output_tokens, one.prompt
            request = GenerationRequest(prompt, prompt_tokens=encode(prompt), max_tokens=tokens, min_tokens=tokens)
            sequences.append(self.engine.sequence(request))
        full_steps = self._step(sequences)
        run = Run(time.perf_counter() - began, full_steps)
        for number, (one, result) in enumerate(zip(asked, (made.result for made in sequences), strict=True)):
            if not isinstance(result, sequence.Completion) or result.num_output_tokens != one.output_tokens:
                raise RuntimeError(f"request {number} asked for {one.output_tokens} tokens and got {result!r}")
        return run

    def _step(self, sequences: Sequence[sequence.Sequence]) -> list[FullStep]:
        """Run the sequences to their ends; return the full steps."""
        waiting, running, full_steps = deque(sequences), list[sequence.Sequence](), list[FullStep]()
        while waiting or running:
            while waiting and len(running) < self.engine.slots:
                running.append(waiting.popleft())
                self.engine.add(running[-1])
            began = time.perf_counter()
            step = self.engine.step()
            taken = time.perf_counter() - began
            # While a prompt is read, its slot doesn't decode.
            if step.decoded == self.engine.slots:
                full_steps.append(FullStep(taken, sum(one.num_cached for one in running)))
            if step.finished:
                running = [one for one in running if one.result is None]
        return full_steps

    def split(self) -> tuple[Run, Node, list[Pass]]:
        """Answer all requests with the stopwatch on; return the run, its parts, and the passes of its model."""
        # Recording is outside: its cost counts to the loop and not to the passes.
        with stopwatch("bare engine", _PROBES, self.settle) as whole, recording() as noted:
            run = self.run()
        whole.rest = "loop, rows and reading the tokens"
        return run, whole, noted
