"""The engine without a server: the same requests, in one thread, all submitted at the start.

Includes tokenization, as in the server; no queue, no scheduler, no responses. Having every request from the start
corresponds to a server at which requests always wait.

Attention, matrices and norms are inside transformers' forward; its rest is Python, the rotary embedding, residuals and
activations. The rest of a pass is positions and mask. The rest of the engine is its loop and rows and, on a GPU,
waiting for the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from llama_engine import sequence
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import choose_device, load_checkpoint
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sampling.sampler import Sampler, SamplingState
from llama_engine.settings import Settings
from llama_engine.slot_batch import SlotBatch
from llama_engine.text.stop_checker import StopChecker
from llama_engine.text.tokenizer import Tokenizer
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm

from perf.load.protocols import Request
from perf.overhead.passes import Pass, recording
from perf.overhead.stopwatch import Node, Probe, settle, stopwatch

SPAN = 64
"""max_model_len is a multiple of it."""
TOKENIZATION = "tokenization"

_PROBES: tuple[Probe, ...] = (
    (Tokenizer, "encode", TOKENIZATION),
    (ModelRunner, "prefill", "prefill"),
    (ModelRunner, "prefill_chunk", "prefill"),
    (ModelRunner, "decode", "decode steps"),
    (LlamaModel, "forward", "transformers' forward"),
    (torch.nn.functional, "scaled_dot_product_attention", "attention"),
    (KVCache, "update", "cache"),
    (ModelRunner, "logits", "head"),
    (Sampler, "sample", "sampling"),
    (SamplingState, "set", "sampling"),
    (SamplingState, "copy", "sampling"),
    (SlotBatch, "add", "slots"),
    (SlotBatch, "advance", "slots"),
    (SlotBatch, "remove", "slots"),
    (StopChecker, "add", "stopping"),
    (sequence.Sequence, "completion", "detokenization"),
)


class Run(NamedTuple):
    """Seconds of one run over all requests, and of this process's processor time in it, where measured."""

    seconds: float
    processor: float | None = None


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
        began, worked = time.perf_counter(), time.process_time()
        encode = self.checkpoint.tokenizer.encode
        results = self.engine.generate(
            [
                GenerationRequest(
                    prompt=one.prompt,
                    prompt_tokens=encode(one.prompt),
                    max_tokens=one.output_tokens,
                    min_tokens=one.output_tokens,
                )
                for one in asked
            ]
        )
        run = Run(time.perf_counter() - began, time.process_time() - worked)
        for number, (one, result) in enumerate(zip(asked, results, strict=True)):
            if not isinstance(result, sequence.Completion) or result.num_output_tokens != one.output_tokens:
                raise RuntimeError(f"request {number} asked for {one.output_tokens} tokens and got {result!r}")
        return run

    def split(self) -> tuple[Run, Node, list[Pass]]:
        """Answer all requests with the stopwatch on; return the run, its parts, and the passes of its model."""
        probes = [*_PROBES, *_layer_probes(self.checkpoint.model)]
        # Recording is outside: its cost counts to the loop and not to the passes.
        with stopwatch("bare engine", probes, self.settle) as whole, recording() as noted:
            run = self.run()
        whole.rest = "loop, rows and reading the tokens"
        return run, whole, noted


def _layer_probes(model: LlamaForCausalLM) -> list[Probe]:
    """Return the probes of the linear layers and norms, whose classes depend on how the model was loaded."""
    kinds = ((torch.nn.Linear, "matrices"), (LlamaRMSNorm, "norms"))
    found = {
        next(owner for owner in type(module).__mro__ if "forward" in vars(owner)): part
        for module in model.modules()
        for kind, part in kinds
        if isinstance(module, kind)
    }
    return [(owner, "forward", part) for owner, part in found.items()]
