"""Where the time of the bare engine is looked for: the engine's own methods, and the heavy ones below them.

Attention, matrices and norms lie inside of transformers' forward; what is left of that is its Python, the rotary
embedding, residuals and activations. What is left of a pass beside forward is positions and mask. What is left of the
engine are its loop and rows, and, on a GPU, waiting for the tokens.
"""

from __future__ import annotations

import torch
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.model_runner import ModelRunner
from llama_engine.rows import Row
from llama_engine.sampling.sampler import Sampler
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
    Probe(ModelRunner, "step", DECODE),
    Probe(LlamaModel, "forward", FORWARD),
    Probe(torch.nn.functional, "scaled_dot_product_attention", "attention"),
    Probe(KVCache, "update", "cache"),
    Probe(ModelRunner, "logits", "head"),
    Probe(Sampler, "sample", "sampling"),
    Probe(Sampler, "admit", "sampling"),
    Probe(Sampler, "retire", "sampling"),
    Probe(ModelRunner, "seat", "slots"),
    Probe(ModelRunner, "advance", "slots"),
    Probe(ModelRunner, "move", "slots"),
    Probe(StopChecker, "add", "stopping"),
    Probe(Row, "completion", "detokenization"),
)


def probes(model: LlamaForCausalLM) -> list[Probe]:
    """Return the probes for this model: its linear layers and norms are of whichever classes it was loaded with."""
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
