"""The compared quantizations against the unquantized weights, each as the engine computes it.

- weights only: products of floats with the INT8 weights; the head in floats (`int8_threshold_0`) or in INT8 too.
- exact INT8, what a CPU serves: activations in 8-bit terms, two, one, or by row; the head too, and the KV cache in each
  dtype.
- LLM.int8() (bitsandbytes): activations rounded to 8 bits, except outlier columns beyond a threshold of 6, which are
  computed in floats; or all of them, at a threshold that nothing reaches.

Reported facts are read back from the loaded models. On a GPU INT8's weights alone are not compared: FP32 products there
are no candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from llama_engine.model.builder import ReadWeights, build_llama
from llama_engine.model.hub import resolve_folder
from llama_engine.model.llama import Linear, Llama
from llama_engine.model.loader import Checkpoint, load_checkpoint
from llama_engine.model.model_info import ModelInfo
from llama_engine.model.rope import rope_tables
from llama_engine.model.saved_tensors import SavedTensors
from llama_engine.model.weight_reader import WeightReader
from llama_engine.model.weights import LinearWeight
from llama_engine.settings import Settings
from torch.nn.functional import linear

from perf.quality.divergence import Forward, distances, kl_nats, perplexity, summary

_WEIGHTS = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}
_KV = {"float32": "FP32", "bfloat16": "BF16", "int8": "INT8"}


class Candidate(NamedTuple):
    """INT8 in one form: settings of the engine; or weights_only.

    terms: of exact INT8, else None. kernels: the setting. quantized: path of a quantized checkpoint to load instead.
    """

    key: str
    title: str
    threshold: float = 0.0
    terms: str | None = None
    kv_cache_dtype: str = "auto"
    kernels: str = "stock"
    weights_only: bool = False
    quantized: str | None = None


UNREACHED = 1000.0
"""The setting's maximum."""
WEIGHTS_ONLY = Candidate("int8_head", "INT8, weights only, head too", weights_only=True)
"""The reference for exact INT8: the same INT8 weights with activations in floats."""
BITSANDBYTES = (
    Candidate("int8_threshold_6", "INT8, threshold 6, activations rounded too", 6.0),
    Candidate("int8_no_outliers", "INT8, no outliers, activations rounded too", UNREACHED),
)
CANDIDATES = (
    Candidate("int8_threshold_0", "INT8, threshold 0, weights only", weights_only=True),
    WEIGHTS_ONLY,
    *(
        Candidate(f"int8_{terms}_terms_kv_{dtype}", f"exact INT8, {words}, KV {kv}", 0.0, terms, dtype, "auto")
        for terms, words in (("auto", "terms by row"), ("2", "two terms"), ("1", "one term"))
        for dtype, kv in _KV.items()
    ),
    *BITSANDBYTES,
)
"""On a CPU."""


def of_checkpoint(path: Path) -> Candidate:
    """Return a quantized checkpoint as a candidate, served with default settings."""
    return Candidate(path.name, path.name, terms="auto", kernels="auto", quantized=str(path))


GPU_CANDIDATES = (
    Candidate("int8_2_terms", "exact INT8, two terms", terms="2", kernels="auto"),
    Candidate("int8_1_terms", "exact INT8, one term", terms="1", kernels="auto"),
    *BITSANDBYTES,
)


def load(base: Settings, device: torch.device, candidate: Candidate | None = None) -> Checkpoint:
    """Load what the engine serves, or the unquantized reference: float16 on a GPU, float32 on a CPU."""
    if candidate is None:
        return load_checkpoint(replace(base, quantization="none"), device)
    if candidate.quantized is not None:
        return load_checkpoint(replace(base, model=candidate.quantized, quantization="checkpoint"), device)
    settings = replace(base, quantization="int8", int8_threshold=candidate.threshold, kernels=candidate.kernels)
    if candidate.terms is not None:
        settings = replace(settings, int8_terms=candidate.terms)
    return load_checkpoint(settings, device)


def weights_only(reference: Checkpoint, head: bool) -> Checkpoint:
    """Return the checkpoint with INT8 weights, one matrix at a time widened for its product of floats.

    head: whether it is in INT8.
    """
    architecture, read = reference.architecture, ReadWeights()
    reader = WeightReader(SavedTensors(resolve_folder(reference.name, None)), architecture, torch.float32, int8=True)
    tables = rope_tables(reference.config, architecture, reference.max_model_len)
    model = build_llama(reader, architecture, tables, _widened, read)
    size = read.bytes
    if not head:
        assert isinstance(reference.model, Llama), "floats are computed by PyTorch"
        model = replace(model, head=reference.model.head)
        vocabulary, hidden = architecture.vocabulary, architecture.hidden
        size += (0 if architecture.tied else 4 * vocabulary * hidden) - vocabulary * (hidden + 4)
    info = replace(reference.info, linears=dict(read.linears), weight_bytes=size, threshold=0.0)
    return replace(reference, model=model, info=info)


def _widened(weight: LinearWeight) -> Linear:
    assert weight.scales is not None, "the reader quantizes every linear layer"
    scales = weight.scales[:, None]
    return lambda activations: linear(activations, weight.weight * scales, weight.bias)


def measured(
    candidate: Candidate,
    reference: Checkpoint,
    same_weights: Checkpoint | None,
    loaded: Checkpoint,
    rows: Sequence[Sequence[int]],
) -> dict[str, dict[str, object]]:
    """Compare the loaded candidate with the reference; return measurements by key, the reference's first.

    same_weights: INT8's weights alone, to compare with, too.
    """
    references = [Forward(checkpoint) for checkpoint in (reference, same_weights) if checkpoint is not None]
    forward = Forward(loaded, candidate.kv_cache_dtype)
    tokens, *others = distances(references, forward, rows)
    products = forward.relative_products()
    name = _WEIGHTS[reference.info.dtype]
    return {
        name.lower(): {
            "title": name,
            **_facts(reference.info),
            "weights": name,
            "perplexity": round(perplexity(tokens.reference_loss), 4),
        },
        candidate.key: {
            "title": candidate.title,
            **_facts(loaded.info),
            "weights": " and ".join(sorted(loaded.info.linears)).upper(),
            "threshold": loaded.info.threshold,
            **summary(tokens),
            **({"kl_from_weights_only_nats": kl_nats(others[0])} if others else {}),
            **({} if products is None else {"products": round(products, 4)}),
        },
    }


def _facts(info: ModelInfo) -> dict[str, object]:
    return {"weights_mib": round(info.weight_bytes / 2**20, 2), "loaded": info.describe()}
