"""Finds a checkpoint's folder: a local one, or the cached snapshot of a hub id, downloaded if necessary.

Only the files of a Llama in safetensors are downloaded, because repositories often also contain pickles and the weights
in other formats.
"""

from __future__ import annotations

from pathlib import Path

from llama_engine.errors import CheckpointError, one_line
from llama_engine.model.checkpoint_files import INDEX, WEIGHTS, weight_files
from llama_engine.model.llama_config import read_config

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


def resolve_folder(name: str, revision: str | None, show_progress: bool = False) -> Path:
    """Return the folder with all files of a checkpoint. name: folder or hub id. revision: of a hub id.

    show_progress: show progress bars of a download. If the hub is unreachable, cached files are used; with
    HF_HUB_OFFLINE only these are. Raises CheckpointError with the reason; a model that is not a Llama is refused before
    its weights are downloaded.
    """
    if Path(name).is_dir():
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
