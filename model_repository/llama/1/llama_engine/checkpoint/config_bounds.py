"""The values that a config's fields may have, checked before anything is computed or allocated from them.

transformers checks the types of some fields, but neither that sizes are positive nor that numbers are finite, and its
errors don't always name the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from llama_engine.bounds import Bound, BoundError, Flag, Integer, Real, show
from llama_engine.checkpoint.architecture import head_dim
from llama_engine.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")

_SIZE, _HEADS, _POSITIONS = Integer(1, 1 << 24), Integer(1, 1 << 16), Integer(1, 1 << 30)
_FACTOR, _SHARE = Real(above=0), Real(above=0, high=1)

_REQUIRED: Mapping[str, Bound[object]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), _SIZE),
    "num_hidden_layers": Integer(1, 1 << 12),
    "num_attention_heads": _HEADS,
    "max_position_embeddings": _POSITIONS,
    "rms_norm_eps": Real(low=0, high=1),
}
"""Fields that may be missing, but not null."""

_OPTIONAL: Mapping[str, Bound[object]] = {
    **dict.fromkeys(("num_key_value_heads", "head_dim"), _HEADS),
    **dict.fromkeys(("sliding_window", "original_max_position_embeddings"), _POSITIONS),
    **dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier", "rope_theta",
         "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"),
        _FACTOR,
    ),
    "partial_rotary_factor": _SHARE,
    **dict.fromkeys(("no_rope_layer_interval", "sliding_window_pattern", "_sliding_window_pattern"), _HEADS),
    **dict.fromkeys(
        ("attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), Flag()
    ),
}  # fmt: skip

_ROPE: Mapping[str, Bound[object]] = {
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings"), _FACTOR),
    "partial_rotary_factor": _SHARE,
}

_QUANTIZATION: Mapping[str, Bound[object]] = {
    "load_in_8bit": Flag(),
    "load_in_4bit": Flag(),
    "llm_int8_threshold": Real(low=0, high=1000),
}


def check_values(values: Mapping[str, Any], where: str) -> None:
    """Check the fields of a config that shapes, memory or factors are computed from.

    Raises CheckpointError naming the field, its value and the bound. where: checkpoint and file, for the message.
    """
    for field, bound in _REQUIRED.items():
        if field in values:
            check_value(where, field, values[field], bound)
    for field, bound in _OPTIONAL.items():
        if values.get(field) is not None:
            check_value(where, field, values[field], bound)
    # transformers checks `layer_types`.
    flags, layers = values.get("no_rope_layers"), values.get("num_hidden_layers", 0)
    if flags is not None and not (isinstance(flags, list) and {*map(type, flags)} <= {int} and len(flags) >= layers):
        refuse(where, "no_rope_layers", flags, f"{layers or 'a list of'} numbers, one for each layer")
    for field in ("rope_parameters", "rope_scaling"):
        if values.get(field) is not None:
            _check_rope(where, field, values[field])
    if values.get("quantization_config") is not None:
        _check_quantization(where, values["quantization_config"])


def check_heads(config: PreTrainedConfig, where: str) -> None:
    """Check fields of a config that depend on each other. Raises CheckpointError as `check_values` does."""
    heads = config.num_attention_heads
    if heads % (config.num_key_value_heads or heads):
        refuse(where, "num_key_value_heads", config.num_key_value_heads, f"a divisor of num_attention_heads, {heads}")
    flags, layers = getattr(config, "no_rope_layers", None), config.num_hidden_layers
    if flags is not None and len(flags) < layers:
        refuse(where, "no_rope_layers", flags, f"{layers} numbers, one for each layer")
    if (dim := head_dim(config)) < 2 or dim % 2:
        refuse(where, "head_dim", dim, "even and at least 2 (it is hidden_size / num_attention_heads if not set)")


def _check_rope(where: str, field: str, value: object) -> None:
    """Check the parameters of RoPE: finite numbers, lists of such, texts, and objects of these for kinds of layers."""
    if not isinstance(value, dict):
        refuse(where, field, value, "an object")
    for key, parameter in value.items():
        if isinstance(parameter, dict):
            _check_rope(where, f"{field}.{key}", parameter)
            continue
        if key in _ROPE and parameter is not None:
            check_value(where, f"{field}.{key}", parameter, _ROPE[key])
            continue
        for number in parameter if isinstance(parameter, list) else [parameter]:
            if not isinstance(number, bool | str | None):
                check_value(where, f"{field}.{key}", number, Real())


def _check_quantization(where: str, value: object) -> None:
    """Check the fields that choose the format; formats check their own."""
    if not isinstance(value, dict):
        refuse(where, "quantization_config", value, "an object")
    for field, bound in _QUANTIZATION.items():
        if value.get(field) is not None:
            check_value(where, f"quantization_config.{field}", value[field], bound)
    for field in ("quant_method", "bnb_4bit_quant_type"):
        if not isinstance(value.get(field), str | None):
            refuse(where, f"quantization_config.{field}", value[field], "a text")


def check_value(where: str, field: str, value: object, bound: Bound[T]) -> T:
    """Return a field's value. Raises CheckpointError naming the field, its value and the bound."""
    try:
        # A bound takes numbers and flags as text, too.
        return bound.parse([value] if isinstance(value, str) else value)
    except BoundError as error:
        refuse(where, field, value, error.bound)


def refuse(where: str, field: str, value: object, bound: str) -> NoReturn:
    """Raise the CheckpointError of a field's value."""
    raise CheckpointError(f"can't load {where}: {field} is {show(value)}; it must be {bound}")
