"""Quantizing a checkpoint, saving it, and the proof that what was saved is what was quantized.

Loads through the server's own `load_checkpoint`, before and after: a server gets from the result what it would have
made of the original. What isn't quantized stays in the dtype it was saved in, and the server casts it as it would have.
From whatever dtype, bitsandbytes rounds by way of float16: the 8-bit weights are those that a server makes at `dtype`
auto, float32 or float16. At bfloat16 it would first round the weights of a finer checkpoint to that.
"""

from __future__ import annotations

import gc
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from llama_engine.model.loader import Checkpoint, choose_device, load_checkpoint
from llama_engine.settings import Settings
from transformers import GenerationConfig, LlamaForCausalLM

from triton_prepare.checkpoint_files import GENERATION_CONFIG
from triton_prepare.errors import PlaceError, VerificationError, first_line
from triton_prepare.progress import on_terminal

_PROMPT_TOKENS = 16
_TOLERANCE = 0.01


@dataclass(frozen=True)
class Fingerprint:
    """What a loaded model is. tensors: a digest of each one's dtype, shape and bytes, by its name.

    logits: [tokens, vocabulary] of one forward pass, in float32, on the CPU.
    """

    tensors: Mapping[str, str]
    logits: torch.Tensor


def device_of(setting: str) -> torch.device:
    """Return the device that `auto`, `cpu` or `cuda` is here. Raises CheckpointError for a GPU that isn't there."""
    return choose_device(setting, 0 if setting == "auto" and torch.cuda.is_available() else None)


def quantize(source: Path, kept: Sequence[str], out: Path, dtype: str, device: torch.device) -> Fingerprint:
    """Quantize a checkpoint and save it to a folder; return what the model was before it was saved.

    kept: names of files that are taken over as they are. Raises CheckpointError for one that the server couldn't load,
    PlaceError if the result can't be written.
    """
    model = _load(source, dtype, device).model
    fingerprint = _fingerprint(model)
    try:
        if GENERATION_CONFIG in kept:
            # It is taken over as it is; saving the model's would refuse one that transformers finds questionable.
            model.generation_config = GenerationConfig()
        model.save_pretrained(out)
        for name in kept:
            shutil.copyfile(source / name, out / name)
    except Exception as error:
        # safetensors reports a full disk in an error of its own.
        raise PlaceError(f"{out} can't be written: {first_line(error)}") from error
    return fingerprint


def verify(out: Path, dtype: str, device: torch.device, expected: Fingerprint) -> None:
    """Load what was saved and compare. Raises VerificationError where it isn't what was quantized."""
    # The model before it may still wait for the garbage collector; two would be too many.
    gc.collect()
    compare(expected, _fingerprint(_load(out, dtype, device).model))


def compare(expected: Fingerprint, found: Fingerprint) -> None:
    """Raise VerificationError unless the tensors are the same bit for bit, and the logits within rounding.

    The logits too because not everything that shapes them is a tensor. Equal tensors at other addresses may be summed
    up in another order: a hundredth of the logits' spread is allowed for that.
    """
    names = sorted(expected.tensors.keys() | found.tensors.keys())
    if different := [name for name in names if expected.tensors.get(name) != found.tensors.get(name)]:
        raise VerificationError(
            f"{len(different)} of {len(names)} tensors are not what was quantized, first {different[0]}"
        )
    furthest = (expected.logits - found.logits).abs().max().item()
    spread = expected.logits.std().item()
    # Written so that a NaN on either side is a difference.
    if not furthest <= _TOLERANCE * spread:
        raise VerificationError(f"the logits of a forward pass are up to {furthest:g} off, with a spread of {spread:g}")


def _load(folder: Path, dtype: str, device: torch.device) -> Checkpoint:
    settings = Settings(model=str(folder), quantization="int8", dtype=dtype)
    return load_checkpoint(settings, device, show_progress=on_terminal())


@torch.inference_mode()
def _fingerprint(model: LlamaForCausalLM) -> Fingerprint:
    vocabulary = model.config.vocab_size
    # All over the vocabulary.
    tokens = [7919 * index % vocabulary for index in range(min(_PROMPT_TOKENS, model.config.max_position_embeddings))]
    logits = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0].float().cpu()
    return Fingerprint({name: _digest(tensor) for name, tensor in model.state_dict().items()}, logits)


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    # As bytes, because numpy has no bfloat16.
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
