"""Checks that a checkpoint's files are readable and complete, because transformers' errors do not name the file.

The usual defect is a truncated copy of one weight file. Only the headers of weight files are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llama_engine.bounds import show
from llama_engine.checkpoint.json_files import file_error, read_object
from llama_engine.checkpoint.safetensors_header import TensorHeader, read_header

JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODULES, TRANSFORMER, POOLING = "modules.json", "sentence_bert_config.json", "1_Pooling"
"""sentence-transformers' list of modules, its config of the first one, and its folder of the second one."""


def check_files(folder: Path) -> None:
    """Check each existing file that the loader reads; the loader itself detects missing files.

    Raises CheckpointError naming the first file that is unreadable or incomplete.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        # Reading a pipe or a device waits or does not end.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise file_error(path, "it is neither a file nor a folder")
    for name in JSON_FILES:
        if (folder / name).exists():
            read_object(folder / name)
    read_headers(folder)


def read_headers(folder: Path) -> Mapping[str, tuple[Path, TensorHeader]]:
    """Return each saved tensor's file and header by name.

    Raises CheckpointError if a file is unreadable or incomplete, or if two files have a tensor of the same name.
    """
    tensors: dict[str, tuple[Path, TensorHeader]] = {}
    for path in weight_files(folder):
        for name, header in read_header(path).items():
            if name in tensors:
                raise file_error(path, f"it has the tensor {name}, which {tensors[name][0].name} has, too")
            tensors[name] = path, header
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files: the single file, or the files listed in the index.

    A listed file is in the folder; like every file it may be a link, as in the cache of the hub.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        return []
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise file_error(index, "it has no weight_map from weights to files")
    names = sorted(set(named.values()))
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name or "\0" in name:
            raise file_error(
                index, f"its weight_map has {show(name)}, which is no name of a safetensors file beside it"
            )
    return [folder / name for name in names]


def weights_advice(folder: Path) -> str:
    """Return the end of an error: what a folder has instead of readable weights, and what to do if it has any."""
    if shards := sorted(path.name for path in folder.glob("*.safetensors")):
        return f"it has {shards[0]} and no {INDEX}, which lists the files of the weights; download that, too"
    if pickles := sorted(path.name for suffix in ("bin", "pth", "pt") for path in folder.glob(f"*.{suffix}")):
        return (
            f"it has {pickles[0]} and no safetensors; files of pickles can run code and aren't read: save the model "
            f"with transformers' save_pretrained, which writes {WEIGHTS}"
        )
    return f"it has no {WEIGHTS}, nor an index of several such files"
