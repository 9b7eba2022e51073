"""GGUF files of small models with random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from models.gguf_checkpoints import write_tensors

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
    assert isinstance(model.config, PreTrainedConfig)
    tensors = ((name, tensor.float().numpy()) for name, tensor in model.state_dict().items())
    metadata = {"tokenizer.ggml.eos_token_id": 2, **(metadata or {})}
    return write_tensors(path, model.config, tensors, lambda _: kind, metadata)
