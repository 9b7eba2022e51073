"""Quantize a checkpoint, save it, and prove that the saved files hold what was quantized; copy one that is quantized.

Loads through transformers, as the server loads what it doesn't read by itself; what it reads by itself has the same
bits. Tensors that aren't quantized keep the dtype they were saved in. The 8-bit weights are those that a server makes
at `dtype` auto, float32 or float16, as bitsandbytes rounds by way of float16; at bfloat16 it would first round finer
weights to it.
"""

import gc
import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import llama_engine.libraries  # noqa: F401 - before anything that imports torch or bitsandbytes
import torch
from huggingface_hub import errors, get_local_safetensors_metadata
from llama_engine.errors import one_line
from llama_engine.model.checkpoint_files import check_files
from llama_engine.model.config import read_config
from llama_engine.model.loader import load_checkpoint, loading
from llama_engine.model.precision import choose_device
from llama_engine.model.transformers_reader import load_with_transformers
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import read_tokenizer
from transformers import GenerationConfig, PreTrainedModel

from triton_prepare.progress import PrepareError, stage

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Digests of the tensors by name; logits [tokens, vocabulary] of a forward pass, float32, on the CPU.
_Fingerprint = tuple[Mapping[str, str], torch.Tensor]


def saved_dtype(model: str, folder: Path) -> str:
    """Return the dtype of the saved weights; float32 for several, which it holds. Raises PrepareError."""
    try:
        files = get_local_safetensors_metadata(folder).files_metadata.values()
        tensors = [item for file in files for item in file.tensors.items()]
    except (errors.SafetensorsParsingError, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise PrepareError(f"{model}: the weights can't be read: {one_line(error)}") from error
    # Older checkpoints also have tables of rotary frequencies, which are computed today.
    dtypes = sorted({tensor.dtype for name, tensor in tensors if name.endswith((".weight", ".bias"))})
    if not dtypes or not _DTYPES.keys() >= {*dtypes}:
        names = ", ".join(dtypes) or "no dtype at all"
        raise PrepareError(f"{model} has weights in {names}; {', '.join(_DTYPES)} can be quantized")
    return _DTYPES[dtypes[0]] if len(dtypes) == 1 else "float32"


def quantize(folder: Path, copied: Sequence[str], dtype: str, out: Path, setting: str) -> torch.device:
    """Quantize a checkpoint, save it to `out`, copy the files `copied`, and verify; return the device that did it."""
    device = choose_device(setting, 0 if setting == "auto" and torch.cuda.is_available() else None)
    with stage(f"quantizing {dtype} on {device}"):
        model = _load(folder, dtype, device)
        expected = _fingerprint(model)
        try:
            if "generation_config.json" in copied:
                model.generation_config = GenerationConfig()  # save_pretrained refuses some that are copied below.
            model.save_pretrained(out)
            for name in copied:
                shutil.copyfile(folder / name, out / name)
        except Exception as error:  # safetensors reports a full disk in an error class of its own.
            raise PrepareError(f"{out} can't be written: {one_line(error)}") from error
    with stage("verifying: loading it again"):
        del model  # Two models may not fit in memory.
        gc.collect()
        compare(expected, _fingerprint(_load(out, dtype, device)))
    return device


def copy(folder: Path, names: Sequence[str], out: Path, setting: str) -> torch.device:
    """Copy a checkpoint that is quantized already, and load the copy as a server does; return the device."""
    device = choose_device(setting, 0 if setting == "auto" and torch.cuda.is_available() else None)
    with stage("copying"):
        for name in names:
            shutil.copyfile(folder / name, out / name)
    with stage(f"verifying: loading it on {device}"):
        load_checkpoint(Settings(model=str(out), quantization="checkpoint"), device)
    return device


def compare(expected: _Fingerprint, saved: _Fingerprint) -> None:
    """Raise PrepareError unless the tensors are equal bit for bit, and the logits within rounding."""
    # Tensors alone don't determine logits; at other addresses equal tensors may be summed in another order.
    if different := {name for name, _ in expected[0].items() ^ saved[0].items()}:
        total = len(expected[0].keys() | saved[0].keys())
        raise PrepareError(f"{len(different)} of {total} tensors are not what was quantized, first {min(different)}")
    difference, deviation = (expected[1] - saved[1]).abs().max().item(), expected[1].std().item()
    if not difference <= deviation / 100:  # Negated, so that a NaN on either side is refused.
        raise PrepareError(f"the logits of a forward pass are up to {difference:g} off, with a spread of {deviation:g}")


def _load(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    settings = Settings(model=str(folder), quantization="int8", dtype=dtype)
    check_files(folder)
    with loading(str(folder), show_progress=sys.stderr.isatty()):
        config = read_config(folder, str(folder))
        read_tokenizer(folder, config)  # A checkpoint without one can't be served.
        return load_with_transformers(str(folder), config, settings, device, getattr(torch, dtype))


@torch.inference_mode()
def _fingerprint(model: PreTrainedModel) -> _Fingerprint:
    # Tokens spread over the vocabulary.
    tokens = [7919 * n % model.config.vocab_size for n in range(min(16, model.config.max_position_embeddings))]
    logits = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0].float().cpu()
    return {name: _digest(tensor) for name, tensor in model.state_dict().items()}, logits


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data  # numpy has no bfloat16.
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"
