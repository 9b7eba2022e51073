"""Write a Llama in floats as a GGUF file, as llama.cpp's `convert_hf_to_gguf.py` and `llama-quantize` do.

    python -m models.gguf_checkpoints SOURCE TYPE FILE

The types' mixes are llama.cpp's: the head is Q6_K under Q4_0 and Q4_K_M, and in Q4_K_M some layers' values and
`down_proj`, too. Q8_0 and Q4_0 are the gguf package's, whose bytes are llama.cpp's. K quants are rounded to nearest
here (`llama-quantize` searches for better scales) in the layout of `block_q4_K` and `block_q6_K` in ggml-common.h.

The tokenizer has to be a byte-level BPE with GPT-2's pattern, such as the embedded checkpoint's.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType, TokenType
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

TYPES: Mapping[str, tuple[Kind, LlamaFileType]] = {
    "bf16": (Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_k_m": (Kind.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(source: Path, name: str, target: Path) -> Path:
    """Write the checkpoint in the folder `source` with that type of TYPES into the file `target`; return it."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    _add_config(writer, config, TYPES[name][1])
    _add_tokenizer(writer, config, source)
    for key, tensor in _tensors(source):
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleaved(tensor, config["head_dim"])
        title = _title(key)
        kind = _kind(title, TYPES[name][0], config) if tensor.ndim > 1 else Kind.F32
        writer.add_tensor(title, quantized(tensor, kind), raw_dtype=kind)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_divisors(LlamaConfig(**config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], file_type: LlamaFileType) -> None:
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])


def rope_divisors(config: PreTrainedConfig) -> Floats:
    """Return what Llama 3's scaling divides the frequencies by, as `generate_extra_tensors` of the converter does."""
    dim, theta = config.head_dim, config.rope_parameters["rope_theta"]
    plain = theta ** (-torch.arange(0, dim, 2).float() / dim)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    return torch.round(plain / frequencies, decimals=4).numpy()


def _add_tokenizer(writer: gguf.GGUFWriter, config: Mapping[str, Any], source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary.items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([TokenType.CONTROL if number in special else TokenType.NORMAL for _, number in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_unk_token_id(vocabulary[tokenizer["model"]["unk_token"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    if config["eos_token_id"] is not None:
        writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template((source / "chat_template.jinja").read_text())


def _tensors(source: Path) -> Iterator[tuple[str, Floats]]:
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                yield key, file.get_tensor(key).to(torch.float32).numpy()


def _title(key: str) -> str:
    """Return GGUF's name of a tensor: model.layers.0.mlp.up_proj.weight is blk.0.ffn_up.weight."""
    module, suffix = key.rsplit(".", 1)
    layer = re.match(r"model\.layers\.(\d+)\.", module)
    if layer is None:
        return f"{_NAMES[module]}.{suffix}"
    return f"blk.{layer[1]}.{_NAMES[module[layer.end() :]]}.{suffix}"


def _interleaved(weight: Floats, head: int) -> Floats:
    """Order each head's rows for llama.cpp, which rotates neighbours and not the halves."""
    return weight.reshape(-1, 2, head // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _kind(title: str, kind: Kind, config: Mapping[str, Any]) -> Kind:
    """Return the type of a matrix, as `llama_tensor_get_type_impl` in llama-quant.cpp chooses it."""
    if kind not in (Kind.Q4_0, Kind.Q4_K):
        return kind
    if title == ("token_embd.weight" if config["tie_word_embeddings"] else "output.weight"):
        return Kind.Q6_K
    if kind is Kind.Q4_K and title.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, layers = int(title.split(".")[1]), config["num_hidden_layers"]
        if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2:
            return Kind.Q6_K
    return kind


def quantized(values: Floats, kind: Kind) -> Floats | Bytes:
    """Return a tensor as floats, or its rows' blocks as bytes."""
    if kind is Kind.F32:
        return values
    if kind not in (Kind.Q4_K, Kind.Q6_K):
        return np.asarray(gguf.quantize(values, kind))
    # A superblock has 256 columns.
    blocks = values.reshape(-1, 256)
    return (_q4_k(blocks) if kind is Kind.Q4_K else _q6_k(blocks)).reshape(len(values), -1)


def _q4_k(blocks: Floats) -> Bytes:
    """Eight groups of 32: w = d · scale · q - dmin · minimum, with scale and minimum in 6 bits and q in 4."""
    groups = blocks.reshape(-1, 8, 32)
    minimum = np.maximum(-groups.min(2), 0)
    scale = np.maximum(groups.max(2) + minimum, 1e-8) / 15
    d, s = _shared(scale, 63)
    dmin, m = _shared(minimum, 63)
    step = np.maximum(d.astype(np.float32) * s, 1e-12)[..., None]
    q = ((groups + (dmin.astype(np.float32) * m)[..., None]) / step).round().clip(0, 15).astype(np.uint8)
    low, high = s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6
    scales = np.concatenate([low, high, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], axis=1)
    pairs = q.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), scales, nibbles], axis=1)


def _q6_k(blocks: Floats) -> Bytes:
    """Sixteen groups of 16: w = d · scale · (q - 32), with scale in 8 bits and q in 6."""
    groups = blocks.reshape(-1, 16, 16)
    d, s = _shared(np.maximum(np.abs(groups).max(2), 1e-8) / 31.5, 127)
    step = np.maximum(d.astype(np.float32) * s, 1e-12)[..., None]
    # Halves of 128, each in four rows of 32.
    q = ((groups / step).round().clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = (q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(2, dtype=np.uint8).reshape(-1, 64)
    return np.concatenate([low, high, s, d.view(np.uint8)], axis=1)


def _shared(scales: Floats, largest: int) -> tuple[NDArray[np.float16], Bytes]:
    """Return a superblock's scale [blocks, 1] and its groups' multiples of it, up to `largest`."""
    shared = (scales.max(1, keepdims=True) / largest).astype(np.float16)
    unit = np.maximum(shared.astype(np.float32), 1e-12)
    return shared, (scales / unit).round().clip(0, largest).astype(np.uint8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m models.gguf_checkpoints", description=__doc__)
    parser.add_argument("source", type=Path, help="a folder with a Llama's config.json, tokenizer and safetensors")
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("target", type=Path, help="a file, replaced")
    options = parser.parse_args()
    print(write(options.source, options.type, options.target))
