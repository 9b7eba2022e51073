"""A model's config from the metadata of its GGUF file.

transformers' own conversion (`AutoConfig.from_pretrained` with `gguf_file`) ignores the scaling of RoPE, windows, soft
caps, biases and some head dimensions. Source: llama.cpp's `conversion` and `src/models`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from llama_engine.checkpoint.config import LlamaConfig
from llama_engine.checkpoint.formats.linear_format import FLOATS
from llama_engine.checkpoint.gguf.header import GgufFile
from llama_engine.checkpoint.gguf.tensors import ROPE_TENSORS
from llama_engine.checkpoint.gguf.tokenizer import end_tokens, token_id
from llama_engine.checkpoint.tensors import read_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's parameters besides the factor. A file has the divisors of the frequencies that follow from them."""

_DEFAULT_THETA = 10000.0
_MAX_POSITIONS = 1 << 24

Options = dict[str, Any]
"""Fields of a config by name."""


def read_gguf_config(file: GgufFile) -> PreTrainedConfig:
    """Return the config of a file. Raises CheckpointError for an architecture or an option that isn't supported."""
    if file.architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise file.error(f"it is of architecture {file.architecture!a}; this engine serves {known} in GGUF")
    values = {**_common(file), "rope_parameters": _rope(file), **FAMILIES[file.architecture](file)}
    if any(tensor.type.name not in FLOATS for tensor in file.tensors.values()):
        values["quantization_config"] = {"quant_method": "gguf"}
    kind = values.pop("model_type")
    if kind == LlamaConfig.model_type:
        return LlamaConfig(**values)
    # Imported here because the Auto classes are slow to import and a Llama doesn't need them.
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **values)


def _common(file: GgufFile) -> Options:
    embedding, output = (file.tensors.get(f"{name}.weight") for name in ("token_embd", "blk.0.attn_output"))
    if embedding is None or output is None:
        raise file.error("it has no token_embd.weight or no blk.0.attn_output.weight")
    hidden, dim, heads = file.count("embedding_length"), file.head_dim, file.count("attention.head_count")
    # Tables and lists of these sizes are made before the shapes of all tensors are checked.
    if output.shape[-1] != dim * heads:
        raise file.error(f"{heads} heads of {dim} dimensions aren't {output.shape[-1]}, as in blk.0.attn_output.weight")
    if embedding.shape[-1] != hidden:
        raise file.error(f"embedding_length is {hidden}; token_embd.weight has {embedding.shape[-1]} columns")
    if (layers := file.count("block_count")) > len(file.tensors):
        raise file.error(f"it has {layers} layers and {len(file.tensors)} tensors")
    if f"blk.{layers}.attn_output.weight" in file.tensors:
        raise file.error(f"it has tensors of more than {layers} layers, its block_count")
    if (positions := file.count("context_length")) > _MAX_POSITIONS:
        raise file.error(f"context_length is {positions}, above {_MAX_POSITIONS}")
    if (values := file.count("attention.value_length", dim)) != dim:
        raise file.error(f"its keys have {dim} dimensions and its values {values}; this engine serves equal ones")
    if file.count("expert_count", 0):
        raise file.error(f"it has {file.count('expert_count', 0)} experts; this engine serves dense models")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("attention.head_count_kv", heads),
        "head_dim": dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": end_tokens(file),
        "pad_token_id": token_id(file, "padding"),
    }


def _has_bias(file: GgufFile, *names: str) -> bool:
    return any(f"blk.0.{name}.bias" in file.tensors for name in names)


def _rope(file: GgufFile) -> Options:
    """Return `rope_parameters`."""
    dim = file.head_dim
    if (rotated := file.count("rope.dimension_count", dim)) != dim and file.architecture != "phi3":
        raise file.error(f"RoPE has {rotated} of {dim} dimensions; this engine serves all in a {file.architecture}")
    theta = {"rope_theta": file.number("rope.freq_base", _DEFAULT_THETA)}
    if "rope_freqs.weight" in file.tensors:
        return theta | _divided(_factors(file, "rope_freqs.weight", dim // 2), theta["rope_theta"], dim, file)
    if "rope_factors_long.weight" in file.tensors:
        return theta | _longrope(file, rotated)
    # A factor without a type is linear, as in llama.cpp.
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "linear")
    factor = file.number("rope.scaling.factor", file.number("rope.scale_linear", 0.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return theta | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise file.error(f"rope.scaling.type is {kind!a}; this engine serves linear and yarn")
    scaling: Options = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.count("rope.scaling.original_context_length")
        for ours, theirs in (("attention_factor", "yarn_attn_factor"), ("beta_fast", "yarn_beta_fast"),
                             ("beta_slow", "yarn_beta_slow")):  # fmt: skip
            if file.has(f"rope.scaling.{theirs}"):
                scaling[ours] = file.number(f"rope.scaling.{theirs}")
    return theta | scaling


def _divided(factors: list[float], theta: float, dim: int, file: GgufFile) -> Options:
    """Return the scaling that divides the frequencies by `factors`: Llama 3's, if they are its."""
    llama3 = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    positions = _LLAMA3["original_max_position_embeddings"]
    for index, factor in enumerate(factors):
        turns = positions * theta ** (-2 * index / dim) / (2 * math.pi)
        share = (turns - _LLAMA3["low_freq_factor"]) / (_LLAMA3["high_freq_factor"] - _LLAMA3["low_freq_factor"])
        share = min(max(share, 0.0), 1.0)
        if not math.isclose(factor, 1 / ((1 - share) / max(factors) + share), rel_tol=1e-3):
            positions = file.count("context_length")
            scaled = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
            return {"rope_type": "longrope", "original_max_position_embeddings": positions, **scaled}
    return llama3


def _longrope(file: GgufFile, rotated: int) -> Options:
    """Return Phi-3's scaling: divisors for short and for long contexts."""
    long, short = (_factors(file, f"rope_factors_{kind}.weight", rotated // 2) for kind in ("long", "short"))
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": file.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": file.count("rope.scaling.original_context_length"),
    }


def _factors(file: GgufFile, name: str, count: int) -> list[float]:
    assert name in ROPE_TENSORS
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or tensor.shape != (count,):
        raise file.error(f"{name} isn't {count} numbers in F32")
    factors = torch.empty(count)
    read_bytes(tensor.path, tensor.begin, factors, name)
    if not (factors.isfinite() & (factors > 0)).all():
        raise file.error(f"{name} has factors that aren't positive")
    return factors.tolist()


def _windows(file: GgufFile, period: int) -> Options:
    """Return windows by layer. period: default; every period-th layer attends to all positions."""
    layers, key = file.count("block_count"), f"{file.architecture}.attention.sliding_window_pattern"
    pattern = file.metadata.get(key, period)
    if isinstance(pattern, tuple):
        slides = list(pattern)
    else:
        period = file.count("attention.sliding_window_pattern", period)
        slides = [layer % period < period - 1 for layer in range(layers)]
    if len(slides) != layers or not all(isinstance(value, bool) for value in slides):
        raise file.error(f"{key} isn't one boolean for each of {layers} layers")
    kinds = ["sliding_attention" if value else "full_attention" for value in slides]
    return {"sliding_window": file.count("attention.sliding_window"), "layer_types": kinds}


def _llama(file: GgufFile) -> Options:
    bias = _has_bias(file, "attn_q", "attn_k", "attn_v", "attn_output")
    values = {"attention_bias": bias, "mlp_bias": _has_bias(file, "ffn_gate", "ffn_up", "ffn_down")}
    if file.count("attention.sliding_window", 0):
        raise file.error("it has a sliding window, which this engine doesn't serve in a llama")
    return {"model_type": "llama", **values}


def _qwen2(file: GgufFile) -> Options:
    return {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(file: GgufFile) -> Options:
    bias = _has_bias(file, "attn_q", "attn_k", "attn_v", "attn_output")
    return {"model_type": "qwen3", "attention_bias": bias, "use_sliding_window": False}


def _smollm3(file: GgufFile) -> Options:
    return {**_llama(file), "model_type": "smollm3"}


def _phi3(file: GgufFile) -> Options:
    values: Options = {"model_type": "phi3", "sliding_window": file.count("attention.sliding_window", 0) or None}
    rotated = file.count("rope.dimension_count", file.head_dim)
    values["partial_rotary_factor"] = rotated / file.head_dim
    # transformers' class takes the original length from the config, too.
    positions = file.count("context_length")
    values["original_max_position_embeddings"] = file.count("rope.scaling.original_context_length", positions)
    return values


def _granite(file: GgufFile) -> Options:
    return {
        **_llama(file),
        "model_type": "granite",
        "attention_multiplier": file.number("attention.scale", file.head_dim**-0.5),
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
    }


def _olmo2(file: GgufFile) -> Options:
    bias = _has_bias(file, "attn_q", "attn_k", "attn_v", "attn_output")
    if not file.count("attention.sliding_window", 0):
        return {"model_type": "olmo2", "attention_bias": bias}
    return {"model_type": "olmo3", "attention_bias": bias, **_windows(file, 4), "rope_parameters": _two_ropes(file)}


def _two_ropes(file: GgufFile, sliding_theta: float | None = None) -> Options:
    """Return the RoPE of layers that attend to all positions, and the unscaled one of sliding layers."""
    full = _rope(file)
    theta = file.number("rope.freq_base_swa", sliding_theta or full["rope_theta"])
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def _seed_oss(file: GgufFile) -> Options:
    return {
        "model_type": "seed_oss",
        "attention_bias": _has_bias(file, "attn_q", "attn_k", "attn_v"),
        "attention_out_bias": _has_bias(file, "attn_output"),
        "mlp_bias": _has_bias(file, "ffn_gate", "ffn_up", "ffn_down"),
    }


def _gemma(file: GgufFile) -> Options:
    return {"model_type": "gemma"}


def _gemma2(file: GgufFile) -> Options:
    return {
        "model_type": "gemma2",
        "query_pre_attn_scalar": _query_scalar(file, 46),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        **_windows(file, 2),
    }


def _gemma3(file: GgufFile) -> Options:
    cap = file.number("final_logit_softcapping", 0.0)
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _query_scalar(file, 62),
        "final_logit_softcapping": cap or None,
        **_windows(file, 6),
        "rope_parameters": _two_ropes(file, _DEFAULT_THETA),
    }


def _query_scalar(file: GgufFile, layers: int) -> int:
    """Return `query_pre_attn_scalar`, which files don't have. It is the head's size, but not for Gemma's largest model.

    layers: the number of that model's layers, by which llama.cpp recognizes it.
    """
    if file.count("block_count") == layers:
        return file.count("embedding_length") // file.count("attention.head_count")
    return file.head_dim


FAMILIES: Mapping[str, Callable[[GgufFile], Options]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "seed_oss": _seed_oss,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""The fields of a config that differ by the architecture of a file, with the model type."""
