"""Quantize a checkpoint, save it, and prove that the saved files hold what was quantized.

Loads through the server's own `load_checkpoint`, before and after saving. Tensors that aren't quantized keep the dtype
they were saved in; the server casts them. bitsandbytes rounds from any dtype by way of float16, so the 8-bit weights
are those that a server makes at `dtype` auto, float32 or float16; at bfloat16 it would first round finer weights to it.
"""

import gc
import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import get_local_safetensors_metadata
from llama_engine.errors import one_line
from llama_engine.model.checkpoint_files import check_files
from llama_engine.model.loader import choose_device, load_checkpoint
from llama_engine.settings import Settings
from transformers import GenerationConfig, LlamaForCausalLM

from triton_prepare.progress import PrepareError, stage

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Digests of the tensors by name; logits [tokens, vocabulary] of a forward pass, float32, on the CPU.
_Fingerprint = tuple[Mapping[str, str], torch.Tensor]


def read_weights(model: str, folder: Path) -> tuple[str, int]:
    """Return the dtype and the number of the saved weights. Raises CheckpointError, PrepareError for other dtypes."""
    check_files(folder)
    files = get_local_safetensors_metadata(folder).files_metadata.values()
    # Older checkpoints also have tables of rotary frequencies, which are computed today.
    tensors = [t for file in files for name, t in file.tensors.items() if name.endswith((".weight", ".bias"))]
    dtypes = sorted({tensor.dtype for tensor in tensors})
    if not tensors or not _DTYPES.keys() >= {*dtypes}:
        raise PrepareError(f"{model} has weights in {', '.join(dtypes)}; {', '.join(_DTYPES)} can be quantized")
    # float32 holds the values of mixed dtypes.
    return _DTYPES[dtypes[0]] if len(dtypes) == 1 else "float32", sum(tensor.parameter_count for tensor in tensors)


def quantize(folder: Path, kept: Sequence[str], dtype: str, out: Path, setting: str) -> torch.device:
    """Quantize a checkpoint, save it to `out`, copy the files `kept`, and verify; return the device that did it."""
    device = choose_device(setting, 0 if setting == "auto" and torch.cuda.is_available() else None)
    with stage(f"quantizing {dtype} on {device}"):
        model = _load(folder, dtype, device)
        expected = _fingerprint(model)
        try:
            if "generation_config.json" in kept:
                # The file is copied; save_pretrained refuses some that from_pretrained accepts.
                model.generation_config = GenerationConfig()
            model.save_pretrained(out)
            for name in kept:
                shutil.copyfile(folder / name, out / name)
        except Exception as error:
            # safetensors reports a full disk in an error class of its own.
            raise PrepareError(f"{out} can't be written: {one_line(error)}") from error
    with stage("verifying: loading it as a server does"):
        # Two models may not fit in memory.
        del model
        gc.collect()
        compare(expected, _fingerprint(_load(out, dtype, device)))
    return device


def compare(expected: _Fingerprint, found: _Fingerprint) -> None:
    """Raise PrepareError unless the tensors are equal bit for bit, and the logits within rounding."""
    # Tensors alone don't determine logits; at other addresses equal tensors may be summed in another order.
    if different := {name for name, _ in expected[0].items() ^ found[0].items()}:
        total = len(expected[0].keys() | found[0].keys())
        raise PrepareError(f"{len(different)} of {total} tensors are not what was quantized, first {min(different)}")
    difference, deviation = (expected[1] - found[1]).abs().max().item(), expected[1].std().item()
    # Negated, so that a NaN on either side is refused.
    if not difference <= deviation / 100:
        raise PrepareError(f"the logits of a forward pass are up to {difference:g} off, with a spread of {deviation:g}")


def _load(folder: Path, dtype: str, device: torch.device) -> LlamaForCausalLM:
    settings = Settings(model=str(folder), quantization="int8", dtype=dtype)
    return load_checkpoint(settings, device, show_progress=sys.stderr.isatty()).model


@torch.inference_mode()
def _fingerprint(model: LlamaForCausalLM) -> _Fingerprint:
    # Tokens spread over the vocabulary.
    tokens = [7919 * n % model.config.vocab_size for n in range(min(16, model.config.max_position_embeddings))]
    logits = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0].float().cpu()
    return {name: _digest(tensor) for name, tensor in model.state_dict().items()}, logits


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    # As bytes: numpy has no bfloat16.
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
