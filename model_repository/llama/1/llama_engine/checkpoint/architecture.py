"""`Architecture`: the shapes and options of a forward pass, from a config. They cover Llama and families like it.

| model types | differences from Llama |
|---|---|
| llama | |
| mistral, ministral | sliding windows |
| qwen2, qwen3 | biases of query, key and value; norms of each query and key head |
| smollm3 | layers without RoPE |
| phi3 | fused projections, partial RoPE |
| granite | factors of embedding, scores, residual and logits |
| olmo2, olmo3 | norms after attention and MLP instead of before; norms of all queries and keys; sliding windows |
| seed_oss | biases of query, key and value apart from the output's |
| gemma | GELU, gains 1 + weight, a factor of the embedding |
| gemma2 | the same, and norms after attention and MLP, soft caps, sliding windows |
| gemma3_text | as gemma2 without caps of scores; norms of each query and key head, two kinds of RoPE |

Source: `modeling_<model type>.py` in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llama_engine.bounds import show
from llama_engine.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Architecture:
    """The shapes and the options of the forward pass.

    epsilon: the RMSNorms'. scaling: factor of the attention scores. activation: the gate's, silu or gelu_tanh.
    windows: for each layer the number of positions that a token attends to, its own included; None is all.
    ropes: for each layer the kind of RoPE, a key of `rope_tables`; None is no RoPE. rotary: number of the first
    dimensions of a head that RoPE rotates.
    query_key_norm: RMSNorms of query and key before RoPE: head (each head, gain [head_dim]), projection (all heads
    together, gain [heads · head_dim]), or none. norm_before, norm_after: RMSNorms of the inputs and of the outputs of
    attention and MLP. gain_offset: added to the saved gains of all norms.
    fused: whether q|k|v and gate|up are saved as one matrix each.
    embedding_scale: factor of the embeddings. residual_scale: that of the outputs of attention and MLP. logits_scale:
    that of the logits. attention_softcap, logits_softcap: c · tanh(x / c) of scores and logits; None is no cap.
    tied: whether the head is the embedding. has_head: whether there is one; without, the embedding takes its place, and
    the model serves embeddings alone.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    epsilon: float
    scaling: float
    tied: bool
    windows: tuple[int | None, ...]
    ropes: tuple[str | None, ...]
    rotary: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    query_key_value_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: Literal["none", "head", "projection"] = "none"
    norm_before: bool = True
    norm_after: bool = False
    gain_offset: float = 0.0
    fused: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    has_head: bool = True

    def describe(self) -> str:
        """Return the shapes as one line, for people."""
        return (
            f"{self.model_type}, {self.layers} layers, hidden {self.hidden:,}, "
            f"{self.heads} heads ({self.kv_heads} KV) of {self.head_dim}, vocabulary {self.vocabulary:,}"
        )


ROPE = "default"
"""The kind of RoPE of models that have one."""

_ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"

Options = dict[str, Any]
"""Fields of `Architecture` by name."""


def _llama(config: PreTrainedConfig) -> Options:
    bias = config.attention_bias
    return {"query_key_value_bias": bias, "output_bias": bias, "mlp_bias": config.mlp_bias}


def _mistral(config: PreTrainedConfig) -> Options:
    return {"windows": (config.sliding_window,) * config.num_hidden_layers}


def _ministral(config: PreTrainedConfig) -> Options:
    return {"windows": _windows(config)}


def _qwen2(config: PreTrainedConfig) -> Options:
    return {"query_key_value_bias": True, "windows": _windows(config)}


def _qwen3(config: PreTrainedConfig) -> Options:
    bias = config.attention_bias
    options = {"query_key_value_bias": bias, "output_bias": bias, "query_key_norm": "head"}
    return {**options, "windows": _windows(config)}


def _smollm3(config: PreTrainedConfig) -> Options:
    ropes = tuple(ROPE if has_rope else None for has_rope in config.no_rope_layers[: config.num_hidden_layers])
    return {**_llama(config), "windows": _windows(config), "ropes": ropes}


def _phi3(config: PreTrainedConfig) -> Options:
    rotary = int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return {**_mistral(config), "fused": True, "rotary": rotary}


def _granite(config: PreTrainedConfig) -> Options:
    return {
        **_llama(config),
        "scaling": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logits_scale": 1 / config.logits_scaling,
    }


def _olmo2(config: PreTrainedConfig) -> Options:
    bias = config.attention_bias
    options = {"query_key_value_bias": bias, "output_bias": bias, "query_key_norm": "projection"}
    return {**options, "norm_before": False, "norm_after": True}


def _olmo3(config: PreTrainedConfig) -> Options:
    return {**_olmo2(config), "windows": _windows(config), "ropes": tuple(config.layer_types)}


def _seed_oss(config: PreTrainedConfig) -> Options:
    options = {"query_key_value_bias": config.attention_bias, "output_bias": config.attention_out_bias}
    return {**options, "mlp_bias": config.mlp_bias}


def _gemma(config: PreTrainedConfig) -> Options:
    bias = config.attention_bias
    options = {"query_key_value_bias": bias, "output_bias": bias}
    return {**options, "gain_offset": 1.0, "embedding_scale": config.hidden_size**0.5}


def _gemma2(config: PreTrainedConfig) -> Options:
    return {
        **_gemma(config),
        "norm_after": True,
        "scaling": config.query_pre_attn_scalar**-0.5,
        "windows": _windows(config),
        "attention_softcap": config.attn_logit_softcapping,
        "logits_softcap": config.final_logit_softcapping,
    }


def _gemma3(config: PreTrainedConfig) -> Options:
    # The modeling code of Gemma 3 ignores the cap of the scores, which its checkpoints don't set.
    options = {**_gemma2(config), "query_key_norm": "head", "ropes": tuple(config.layer_types)}
    return {**options, "attention_softcap": None}


FAMILIES: Mapping[str, Callable[[PreTrainedConfig], Options]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _ministral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "seed_oss": _seed_oss,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
"""The options of a supported model type, from its config."""


def read_architecture(config: PreTrainedConfig, name: str) -> Architecture:
    """Return the architecture of a config of a supported model type.

    Raises CheckpointError for an option that isn't supported. name: the checkpoint's, for error messages.
    """
    # Configs of some Gemma 2 models have both fields.
    field = "hidden_activation" if config.model_type in ("gemma2", "gemma3_text") else "hidden_act"
    if (activation := getattr(config, field)) not in _ACTIVATIONS:
        raise CheckpointError(f"{name}: {field} is {show(activation)}; this engine computes {', '.join(_ACTIVATIONS)}")
    if getattr(config, "use_bidirectional_attention", False):
        raise CheckpointError(f"{name}: use_bidirectional_attention is true; this engine serves causal attention")
    if not getattr(config, "is_causal", True):
        raise CheckpointError(f"{name}: is_causal is false; this engine serves causal attention")
    types = set(getattr(config, "layer_types", None) or ())
    if unknown := types - {_FULL, _SLIDING}:
        kind = show(min(unknown))
        raise CheckpointError(f"{name}: layer_types has {kind}; this engine serves {_FULL} and {_SLIDING}")
    window = getattr(config, "sliding_window", None)
    if (window is None and _SLIDING in types) or (window is not None and window < 1):
        raise CheckpointError(f"{name}: sliding_window is {window}; a layer with {_SLIDING} needs 1 position or more")
    layers, dim = config.num_hidden_layers, head_dim(config)
    options = {
        "scaling": dim**-0.5,
        "windows": (None,) * layers,
        "ropes": (ROPE,) * layers,
        "rotary": dim,
        **FAMILIES[config.model_type](config),
    }
    if options["rotary"] % 2 or not 2 <= options["rotary"] <= dim:
        share = config.rope_parameters.get("partial_rotary_factor")
        raise CheckpointError(
            f"{name}: partial_rotary_factor is {show(share)}, which rotates {options['rotary']} dimensions of a head; "
            f"they must be an even number from 2 to {dim}"
        )
    return Architecture(
        model_type=config.model_type,
        layers=layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        epsilon=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        activation=_ACTIVATIONS[activation],
        **options,
    )


def head_dim(config: PreTrainedConfig) -> int:
    """Return the dimensions of a head of queries and keys."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    return tuple(config.sliding_window if kind == _SLIDING else None for kind in config.layer_types)
