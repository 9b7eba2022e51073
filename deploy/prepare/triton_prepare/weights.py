"""What the headers of a checkpoint's weights say: the dtype they are saved in, and what they will take in 8 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import get_local_safetensors_metadata
from huggingface_hub.errors import SafetensorsParsingError

from triton_prepare.errors import SourceError, first_line

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class SavedWeights:
    """dtype: as PyTorch calls it. bytes: of all tensors. int8_bytes: of the same ones, linear layers in 8 bits."""

    dtype: str
    bytes: int
    int8_bytes: int


def read_weights(model: str, folder: Path) -> SavedWeights:
    """Read the headers of a folder's safetensors. Raises SourceError for a broken one, or a dtype that isn't taken."""
    try:
        files = get_local_safetensors_metadata(folder).files_metadata
    except (SafetensorsParsingError, OSError, ValueError, TypeError, AttributeError) as error:
        raise SourceError(f"{model}: the weights can't be read: {first_line(error)}") from error
    tensors = {
        name: tensor
        for file in files.values()
        for name, tensor in file.tensors.items()
        # Older ones have tables of rotary frequencies as well, which are computed nowadays.
        if name.endswith((".weight", ".bias"))
    }
    found = {tensor.dtype for tensor in tensors.values()}
    if not tensors or not found <= _DTYPES.keys():
        kinds = ", ".join(sorted(found)) or "no dtype at all"
        raise SourceError(f"{model} has weights in {kinds}; {', '.join(_DTYPES)} can be quantized")
    sizes = {name: tensor.data_offsets[1] - tensor.data_offsets[0] for name, tensor in tensors.items()}
    small = {
        # A row has a scale in float32, and a matrix a byte that says how it is laid out.
        name: math.prod(tensor.shape) + 4 * tensor.shape[0] + 1
        for name, tensor in tensors.items()
        # The linear layers of a Llama: q, k, v, o, gate, up and down.
        if name.endswith("_proj.weight")
    }
    # Of several dtypes the one that holds the values of all.
    dtype = _DTYPES[found.pop()] if len(found) == 1 else "float32"
    return SavedWeights(dtype, sum(sizes.values()), sum((sizes | small).values()))
