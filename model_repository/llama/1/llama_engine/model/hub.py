"""Finds a checkpoint's folder: a local one, or the cached snapshot of a hub id, downloaded if necessary.

Only the files of a checkpoint in safetensors are downloaded, because repositories often also contain pickles and the
weights in other formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from llama_engine.errors import CheckpointError, one_line
from llama_engine.model.checkpoint_files import INDEX, WEIGHTS, weight_files
from llama_engine.model.config import read_config

_SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    INDEX,
    # `triton_prepare` copies these: a licence may require it.
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


def resolve_headers(name: str, revision: str | None, scratch: Path) -> Path:
    """Return a folder with a checkpoint's small files and the headers of its weights, or a GGUF file.

    name: folder, GGUF file or hub id.

    Of a hub id whose weights aren't cached, only headers are fetched: into the empty folder `scratch`, in files of the
    weights' sizes with holes instead of their contents. Raises CheckpointError with the reason.
    """
    if Path(name).is_dir() or Path(name).suffix == ".gguf":
        return Path(name)
    # Imported here as in `resolve_folder`.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*_SMALL]))
        weights = weight_files(folder) or [folder / WEIGHTS]
        if all(path.exists() for path in weights):
            return folder
        read_config(folder, name)
        for path in folder.iterdir():
            (scratch / path.name).symlink_to(path)
        # Those that are cached are links now: into the cache, which nothing may write to.
        for path in (path for path in weights if not path.exists()):
            tensors = HfApi().parse_safetensors_file_metadata(name, path.name, revision=folder.name).tensors
            fields = {key: (tensor.dtype, tensor.shape, tensor.data_offsets) for key, tensor in tensors.items()}
            _write_header(scratch / path.name, fields)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"can't read {name}: {one_line(error)}") from error
    return scratch


def _write_header(path: Path, tensors: Mapping[str, tuple[str, list[int], tuple[int, int]]]) -> None:
    """Write a safetensors file with a hole instead of the tensors' contents. tensors: dtype, shape, data offsets."""
    fields = {
        name: dict(zip(("dtype", "shape", "data_offsets"), tensor, strict=True)) for name, tensor in tensors.items()
    }
    header = json.dumps(fields).encode()
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + max((offsets[1] for _, _, offsets in tensors.values()), default=0))


def resolve_folder(name: str, revision: str | None, show_progress: bool = False) -> Path:
    """Return the folder with all files of a checkpoint. name: folder, GGUF file or hub id. revision: of a hub id.

    show_progress: show progress bars of a download. If the hub is unreachable, cached files are used; with
    HF_HUB_OFFLINE only these are. Raises CheckpointError with the reason; an unsupported model is refused before its
    weights are downloaded.
    """
    if Path(name).is_dir() or Path(name).suffix == ".gguf":
        return Path(name)
    # Imported here because most checkpoints are folders, and the import is slow.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not show_progress:
        disable_progress_bars()
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*_SMALL]))
        read_config(folder, name)
        weights = weight_files(folder) or [folder / WEIGHTS]
        if not all(path.exists() for path in weights):
            # Use the resolved commit, because a branch can move between the two downloads.
            snapshot_download(name, revision=folder.name, allow_patterns=[*_SMALL, *(path.name for path in weights)])
    except CheckpointError:
        raise
    except Exception as error:
        # huggingface_hub and its HTTP library have no common base class of exceptions.
        raise CheckpointError(f"can't load {name}: {one_line(error)}") from error
    return folder
