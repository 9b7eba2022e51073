"""The timed methods of the bare engine, and the expensive ones below them.

Attention, matrices and norms are inside transformers' forward; its rest is Python, the rotary embedding, residuals and
activations. The rest of a pass is positions and mask. The rest of the engine is its loop and rows and, on a GPU,
waiting for the tokens.
"""

from __future__ import annotations

import torch
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sampling.sampler import Sampler, SamplingState
from llama_engine.sequence import Sequence
from llama_engine.slot_batch import SlotBatch
from llama_engine.text.stop_checker import StopChecker
from llama_engine.text.tokenizer import Tokenizer
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm

from perf.overhead.stopwatch import Probe

TOKENIZATION = "tokenization"
PREFILL = "prefill"
DECODE = "decode steps"
FORWARD = "transformers' forward"

_PROBES = (
    Probe(Tokenizer, "encode", TOKENIZATION),
    Probe(ModelRunner, "prefill", PREFILL),
    Probe(ModelRunner, "prefill_chunk", PREFILL),
    Probe(ModelRunner, "decode", DECODE),
    Probe(LlamaModel, "forward", FORWARD),
    Probe(torch.nn.functional, "scaled_dot_product_attention", "attention"),
    Probe(KVCache, "update", "cache"),
    Probe(ModelRunner, "logits", "head"),
    Probe(Sampler, "sample", "sampling"),
    Probe(SamplingState, "set", "sampling"),
    Probe(SamplingState, "copy", "sampling"),
    Probe(SlotBatch, "add", "slots"),
    Probe(SlotBatch, "advance", "slots"),
    Probe(SlotBatch, "remove", "slots"),
    Probe(StopChecker, "add", "stopping"),
    Probe(Sequence, "completion", "detokenization"),
)


def probes(model: LlamaForCausalLM) -> list[Probe]:
    """Return the probes for this model, whose linear layers and norms depend on how it was loaded."""
    kinds = ((torch.nn.Linear, "matrices"), (LlamaRMSNorm, "norms"))
    found = {
        _defining_forward(type(module)): part
        for module in model.modules()
        for kind, part in kinds
        if isinstance(module, kind)
    }
    return [*_PROBES, *(Probe(owner, "forward", part) for owner, part in found.items())]


def _defining_forward(kind: type[torch.nn.Module]) -> type:
    return next(owner for owner in kind.__mro__ if "forward" in vars(owner))
