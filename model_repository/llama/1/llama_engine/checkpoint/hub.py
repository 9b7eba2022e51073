"""Finds a checkpoint's folder: a local one, or the cached snapshot of a hub id, downloaded if necessary.

Only the files of a checkpoint in safetensors are downloaded, because repositories often also contain pickles and the
weights in other formats.
"""

from __future__ import annotations

from pathlib import Path

from llama_engine.checkpoint.config import read_config
from llama_engine.checkpoint.files import INDEX, WEIGHTS, weight_files
from llama_engine.errors import CheckpointError, one_line

SMALL_FILES = (
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
"""Patterns of the names of a checkpoint's files besides its weights."""


def resolve_folder(name: str, revision: str | None, show_progress: bool = False, with_weights: bool = True) -> Path:
    """Return the folder with all files of a checkpoint. name: folder, GGUF file or hub id. revision: of a hub id.

    show_progress: show progress bars of a download. with_weights: download weights. If the hub is unreachable, cached
    files are used; with HF_HUB_OFFLINE only these are. Raises CheckpointError with the reason; an unsupported model is
    refused before its weights are downloaded.
    """
    if Path(name).is_dir() or Path(name).suffix == ".gguf":
        return Path(name)
    # Imported here because most checkpoints are folders, and the import is slow.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not show_progress:
        disable_progress_bars()
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES]))
        read_config(folder, name)
        if with_weights and (missing := missing_weights(folder)):
            # Use the resolved commit, because a branch can move between the two downloads.
            snapshot_download(name, revision=folder.name, allow_patterns=[*SMALL_FILES, *missing])
    except CheckpointError:
        raise
    except Exception as error:
        # huggingface_hub and its HTTP library have no common base class of exceptions.
        raise CheckpointError(f"can't load {name}: {one_line(error)}") from error
    return folder


def missing_weights(folder: Path) -> list[str]:
    """Return the names of a checkpoint's weight files that a folder lacks."""
    return [path.name for path in weight_files(folder) or [folder / WEIGHTS] if not path.exists()]
