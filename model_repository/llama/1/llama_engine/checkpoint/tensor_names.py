"""Names and shapes of the tensors in a saved model, by the fields of `LayerWeights`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llama_engine.checkpoint.architecture import Architecture

EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


@dataclass(frozen=True)
class SavedLinear:
    """A saved linear layer. name: without suffixes such as `.weight`. shape: (out, in)."""

    name: str
    shape: tuple[int, int]
    bias: bool = False

    def named(self, prefix: str) -> SavedLinear:
        """Return the same layer with a prefix before its name."""
        return SavedLinear(prefix + self.name, self.shape, self.bias)


def layer_prefix(index: int) -> str:
    """Return the beginning of the names of a decoder layer's tensors. index: from 0."""
    return f"model.layers.{index}."


def layer_linears(architecture: Architecture) -> Mapping[str, tuple[SavedLinear, ...]]:
    """Return the linear layers of a decoder layer whose rows are concatenated in each field."""
    hidden, inner = architecture.hidden, architecture.intermediate
    queries, keys = (count * architecture.head_dim for count in (architecture.heads, architecture.kv_heads))
    bias, output_bias, mlp_bias = architecture.query_key_value_bias, architecture.output_bias, architecture.mlp_bias
    query_key_value: tuple[SavedLinear, ...]
    gate_up: tuple[SavedLinear, ...]
    if architecture.fused:
        query_key_value = (SavedLinear("self_attn.qkv_proj", (queries + 2 * keys, hidden), bias),)
        gate_up = (SavedLinear("mlp.gate_up_proj", (2 * inner, hidden), mlp_bias),)
    else:
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        query_key_value = tuple(SavedLinear(f"self_attn.{name}", (count, hidden), bias) for name, count in rows.items())
        gate_up = tuple(SavedLinear(f"mlp.{name}", (inner, hidden), mlp_bias) for name in ("gate_proj", "up_proj"))
    return {
        "query_key_value": query_key_value,
        "attention_output": (SavedLinear("self_attn.o_proj", (hidden, queries), output_bias),),
        "gate_up": gate_up,
        "down": (SavedLinear("mlp.down_proj", (hidden, inner), mlp_bias),),
    }


def all_linears(architecture: Architecture) -> Iterator[SavedLinear]:
    """Yield the linear layers of all decoder layers."""
    for index in range(architecture.layers):
        for parts in layer_linears(architecture).values():
            yield from (part.named(layer_prefix(index)) for part in parts)


def layer_norms(architecture: Architecture) -> Mapping[str, tuple[str, int]]:
    """Return name and size of the gain of each norm of a decoder layer."""
    hidden, names = architecture.hidden, dict[str, tuple[str, int]]()
    if architecture.norm_before:
        mlp = "pre_feedforward_layernorm" if architecture.norm_after else "post_attention_layernorm"
        names |= {"attention_norm": ("input_layernorm", hidden), "mlp_norm": (mlp, hidden)}
    if architecture.norm_after:
        names["attention_output_norm"] = ("post_attention_layernorm", hidden)
        names["mlp_output_norm"] = ("post_feedforward_layernorm", hidden)
    if architecture.query_key_norm != "none":
        heads = (architecture.heads, architecture.kv_heads) if architecture.query_key_norm == "projection" else (1, 1)
        for kind, count in zip(("query", "key"), heads, strict=True):
            names[f"{kind}_norm"] = (f"self_attn.{kind[0]}_norm", count * architecture.head_dim)
    return names
