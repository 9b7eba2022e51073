"""Small random checkpoints of each family that the engine serves, with the family's real settings in miniature."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from engine.engines import EMBEDDED
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

SLIDING, FULL = "sliding_attention", "full_attention"

_PHI3 = {"model_type": "phi3", "hidden_size": 96, "head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 4}

CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 24, "head_dim": 32},
    "ministral": {
        "model_type": "ministral", "sliding_window": 20, "head_dim": 32, "layer_types": [FULL, SLIDING, SLIDING],
    },
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112},
    "qwen2 with windows": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "num_key_value_heads": 1},
    "phi3": {**_PHI3, "sliding_window": 47},
    "phi3 with longrope": {
        **_PHI3, "num_key_value_heads": 2, "tie_word_embeddings": True, "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + 0.02 * index for index in range(9)],
            "long_factor": [1.1**index for index in range(9)],
        },
    },
    "granite": {
        "model_type": "granite", "num_key_value_heads": 1, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625, "logits_scaling": 8.0, "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 4},
    "olmo3": {
        "model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 20,
        "rope_parameters": {
            FULL: {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 32},
            SLIDING: {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "seed_oss": {
        "model_type": "seed_oss", "hidden_size": 80, "num_attention_heads": 10, "num_key_value_heads": 1,
        "head_dim": 16, "attention_bias": True, "attention_out_bias": False,
    },
    "gemma": {"model_type": "gemma", "head_dim": 64, "num_key_value_heads": 1},
    "gemma2": {
        "model_type": "gemma2", "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 20,
        "query_pre_attn_scalar": 28, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
    },
    "gemma3": {
        "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 32, "num_key_value_heads": 1,
        "sliding_window": 20, "query_pre_attn_scalar": 32,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip
"""What distinguishes each checkpoint's config from `_COMMON`."""

MAX_MODEL_LEN = 256

_COMMON: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_MODEL_LEN, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 3, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip


def save_family(folder: Path, name: str) -> Path:
    """Save a random checkpoint with norms and biases that aren't all alike."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    values = {**_COMMON, "vocab_size": len(tokenizer), **CHECKPOINTS[name]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_base_model(folder: Path, source: Path) -> Path:
    """Save a checkpoint without its output head."""
    AutoModel.from_pretrained(source).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder
