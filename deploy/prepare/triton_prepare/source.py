"""The checkpoint to prepare, in a folder or on the hub: its identity, its files, and whether it can be prepared."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from llama_engine.model.architecture import FAMILIES
from llama_engine.model.manifest import Source, sha256_of

from triton_prepare.progress import PrepareError, say, stage

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Copied unchanged. A licence may require a copy beside the weights.
_COPIED = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "added_tokens.json"]
_COPIED += ["special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"]
_LEGAL = ("LICENSE", "NOTICE", "USE_POLICY")


def find_source(model: str, revision: str | None) -> Source:
    """Return what identifies a folder, its files' content, or a hub id, at first its revision. Raises PrepareError."""
    path = Path(model).expanduser()
    if not path.is_dir():
        if model.startswith(("/", ".", "~")) or model.count("/") > 1 or path.exists():
            raise PrepareError(f"model is {model!r}: no such folder")
        return Source("hub", model, revision or constants.DEFAULT_REVISION, revision)
    if revision is not None:
        raise PrepareError(f"revision is {revision!r}, but {model} is a folder: only a hub id has revisions")
    folder = path.resolve()
    files = sorted(name for names in choose_files(model, folder) for name in names)
    with stage("reading the source", sum((folder / name).stat().st_size for name in files)) as add:
        lines = [f"{sha256_of(folder / name, add)}  {name}\n" for name in files]
    return Source("folder", folder.name, f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}", None)


def is_same(request: Source, prepared: Source) -> bool:
    """Return whether a manifest's source is the requested one. Makes no request: it still is after its branch moved."""
    if request.kind == "folder":
        return (prepared.kind, prepared.revision) == ("folder", request.revision)
    revisions = (prepared.asked_revision, prepared.revision)
    return (prepared.kind, prepared.model) == ("hub", request.model) and request.asked_revision in revisions


def fetch(model: str, request: Source) -> tuple[Path, Source]:
    """Return the folder of a source, if need be downloaded, and the source with its commit. Raises CheckpointError."""
    if request.kind == "folder":
        return Path(model).expanduser().resolve(), request
    from llama_engine.model.hub import resolve_folder  # Here, as importing PyTorch takes seconds.

    with stage("downloading"):
        folder = resolve_folder(model, request.asked_revision, show_progress=sys.stderr.isatty())
    say(f"{model} at {request.revision} is commit {folder.name}")
    return folder, Source("hub", model, folder.name, request.asked_revision)


def choose_files(model: str, folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the files that are loaded, and of those that are copied.

    Raises PrepareError unless it is of a supported model type, in safetensors, and complete.
    """
    config = _json(model, folder / _CONFIG)
    if config.get("model_type") not in FAMILIES:
        raise PrepareError(
            f"{model} is a {config.get('model_type')!r} checkpoint; this project serves {', '.join(FAMILIES)}"
        )
    names = {path.name for path in folder.iterdir() if path.is_file()}
    loaded = [_CONFIG, _WEIGHTS]
    if _INDEX in names and _WEIGHTS not in names:  # transformers, too, prefers a single file to an index.
        weight_map = _json(model, folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise PrepareError(f"{model}: {_INDEX} has no weight_map")
        loaded = [_CONFIG, _INDEX, *sorted({str(name) for name in weight_map.values()})]
    if missing := sorted({*loaded} - names):
        if missing[0] == _WEIGHTS:
            raise PrepareError(f"{model} has no {_WEIGHTS}: weights in safetensors are needed, as pickles can run code")
        raise PrepareError(f"{model} lacks {len(missing)} of {len(loaded) - 2} files of weights, first {missing[0]}")
    return loaded, [name for name in sorted(names) if name in _COPIED or name.startswith(_LEGAL)]


def is_quantized(model: str, folder: Path) -> bool:
    """Return whether the checkpoint is saved quantized."""
    return bool(_json(model, folder / _CONFIG).get("quantization_config"))


def saved_threshold(model: str, folder: Path) -> float | None:
    """Return the outlier threshold that is saved with 8-bit weights of bitsandbytes; None if there is none."""
    config = _json(model, folder / _CONFIG)["quantization_config"]
    # 4-bit configs of bitsandbytes have one too, without a use.
    return config.get("llm_int8_threshold") if config.get("load_in_8bit") else None


def _json(model: str, path: Path) -> dict[str, Any]:
    try:
        return {**json.loads(path.read_bytes())}
    except FileNotFoundError as error:
        raise PrepareError(f"{model} has no {path.name}: it is no checkpoint") from error
    except (ValueError, TypeError) as error:
        raise PrepareError(f"{model}: {path.name} is not a JSON object: {error}") from error
