"""GGUF files of small models with random weights, in the names and orders of llama.cpp's converter.

Source: `conversion` in llama.cpp, whose own files of these families were read with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from models.gguf_checkpoints import quantized, rope_divisors

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_BIASES = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "Llama 3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32, "max_position_embeddings": 131072}),
    "llama, linear RoPE": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {"sliding_window": 64}),
    "granite": ("granite", {"attention_multiplier": 0.02, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                            "logits_scaling": 8.0}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 64}),
    "seed_oss": ("seed_oss", {"head_dim": 32, **_BIASES}),
    "gemma": ("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
}  # fmt: skip
"""Model type and options of small models, at least one for each model type that GGUF has."""

_SMALL = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
    "tie_word_embeddings": False,
}  # fmt: skip
_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"}
_INTERLEAVED = ("llama", "granite", "smollm3")
_NUMBERS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "attention.sliding_window": "sliding_window",
}  # fmt: skip

Metadata = Mapping[str, object]


def small_model(model_type: str, **changed: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**_SMALL, **changed}))
    for parameter in model.parameters():
        # Norms and biases are ones and zeros otherwise.
        torch.nn.init.normal_(parameter.data, std=0.5 if parameter.ndim == 1 else 0.05)
    return model.requires_grad_(False)  # type: ignore[no-any-return]  # the Auto class isn't annotated


def write_model(path: Path, model: torch.nn.Module, kind: Kind = Kind.F32, metadata: Metadata | None = None) -> Path:
    """Write a model's weights, matrices in that type, and its config. metadata: more of it by key; None omits a key."""
    config = model.config
    assert isinstance(config, PreTrainedConfig)
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_metadata(config, architecture), **(metadata or {})}.items():
        _add(writer, key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        title = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert title is not None
        if architecture in _INTERLEAVED and name.split(".")[-2] in ("q_proj", "k_proj"):
            tensor = tensor.unflatten(0, (-1, 2, _head_dim(config) // 2)).transpose(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        of = kind if tensor.ndim > 1 else Kind.F32
        writer.add_tensor(title, quantized(tensor.float().numpy(), of), raw_dtype=of)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: PreTrainedConfig, architecture: str) -> dict[str, object]:
    values = {key: getattr(config, name, None) for key, name in _NUMBERS.items()}
    if layer_types := getattr(config, "layer_types", None):
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in layer_types]
    values |= dict.fromkeys(
        ("attention.key_length", "attention.value_length", "rope.dimension_count"), _head_dim(config)
    )
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    values["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        values["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    return {f"{architecture}.{key}": value for key, value in values.items()} | {"tokenizer.ggml.eos_token_id": 2}


def _head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, list | tuple):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
