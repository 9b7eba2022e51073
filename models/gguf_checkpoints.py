"""Write a Llama in floats as a GGUF file, as llama.cpp's `convert_hf_to_gguf.py` and `llama-quantize` do.

The types' mixes are llama.cpp's: the head is Q6_K under Q4_0 and Q4_K_M, and in Q4_K_M some layers' values and
`down_proj`, too. Q8_0 and Q4_0 are the gguf package's, whose bytes are llama.cpp's. K quants are rounded to nearest
here (`llama-quantize` searches for better scales) in the layout of `block_q4_K` and `block_q6_K` in ggml-common.h.

The tokenizer has to be a byte-level BPE with GPT-2's pattern, such as `pydoc-llama`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as ValueType
from gguf import LlamaFileType, TokenType
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.quantized_checkpoints import saved_tensors

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

TYPES: Mapping[str, tuple[Kind, LlamaFileType]] = {
    "bf16": (Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_k_m": (Kind.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
}
_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"}
# Not imported from the engine, whose reader is tested with these files: both would have the same fault.
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


def write(source: Path, name: str, target: Path) -> Path:
    """Write the checkpoint in the folder `source` with that type of TYPES into the file `target`; return it."""
    config = AutoConfig.from_pretrained(source)
    kind, file_type = TYPES[name]
    metadata: dict[str, object] = {
        "general.file_type": int(file_type),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        f"{config.model_type}.vocab_size": config.vocab_size,
        **_tokenizer(source, config),
    }
    tensors = ((key, tensor.to(torch.float32).numpy()) for key, tensor in saved_tensors(source))
    return write_tensors(target, config, tensors, lambda title: _kind(title, kind, config), metadata)


def write_tensors(
    path: Path,
    config: PreTrainedConfig,
    tensors: Iterable[tuple[str, Floats]],
    kind_of: Callable[[str], Kind],
    metadata: Mapping[str, object],
) -> Path:
    """Write a model of any family by its config and its tensors by name; return the path.

    kind_of: the type of a matrix by GGUF's name of it. metadata: more of it, or other values; None omits a key.
    Source of names and orders: `conversion` in llama.cpp, whose own files were read with the same result.
    """
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    # Seven billion parameters would take 7 GB of memory.
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    for key, value in {**_metadata(config, architecture), **metadata}.items():
        if value not in (None, "", []):
            type_ = ValueType.get_type(value)
            # llama.cpp reads unsigned integers.
            writer.add_key_value(key, value, ValueType.UINT32 if type_ is ValueType.INT32 else type_)
    for name, tensor in tensors:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        title = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert title is not None
        if architecture in _INTERLEAVED and name.split(".")[-2] in ("q_proj", "k_proj"):
            tensor = _interleaved(tensor, _head_dim(config))
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        kind = kind_of(title) if tensor.ndim > 1 else Kind.F32
        writer.add_tensor(title, quantized(tensor, kind), raw_dtype=kind)
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
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_divisors(config: PreTrainedConfig) -> Floats:
    """Return what Llama 3's scaling divides the frequencies by, as `generate_extra_tensors` of the converter does."""
    dim, theta = config.head_dim, config.rope_parameters["rope_theta"]
    plain = theta ** (-torch.arange(0, dim, 2).float() / dim)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    return torch.round(plain / frequencies, decimals=4).numpy()


def _tokenizer(source: Path, config: PreTrainedConfig) -> dict[str, object]:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary.items(), key=lambda item: item[1])
    kinds = [TokenType.CONTROL if number in special else TokenType.NORMAL for _, number in tokens]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [token for token, _ in tokens],
        "token_type": [int(kind) for kind in kinds],
        "merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "unknown_token_id": vocabulary[tokenizer["model"]["unk_token"]],
        "bos_token_id": config.bos_token_id,
        "padding_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "add_bos_token": True,
    }
    template = (source / "chat_template.jinja").read_text()
    return {**{f"tokenizer.ggml.{key}": value for key, value in values.items()}, "tokenizer.chat_template": template}


def _interleaved(tensor: Floats, head: int) -> Floats:
    """Order each head's rows for llama.cpp, which rotates neighbours and not the halves."""
    return tensor.reshape(-1, 2, head // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _kind(title: str, kind: Kind, config: PreTrainedConfig) -> Kind:
    """Return the type of a matrix, as `llama_tensor_get_type_impl` in llama-quant.cpp chooses it."""
    if kind not in (Kind.Q4_0, Kind.Q4_K):
        return kind
    if title == ("token_embd.weight" if config.tie_word_embeddings else "output.weight"):
        return Kind.Q6_K
    if kind is Kind.Q4_K and title.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, layers = int(title.split(".")[1]), config.num_hidden_layers
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
