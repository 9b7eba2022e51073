"""The checkpoint to prepare, in a folder or on the hub: its identity, its files, and whether it can be prepared."""

import hashlib
import json
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, get_token, snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars
from llama_engine.errors import one_line
from llama_engine.model.manifest import Source, sha256_of

from triton_prepare.progress import PrepareError, say, stage

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Copied unchanged. A licence may require a copy beside the weights.
_KEPT = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "added_tokens.json"]
_KEPT += ["special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"]
_LEGAL = ("LICENSE", "NOTICE", "USE_POLICY")
_SMALL = [_CONFIG, _INDEX, *_KEPT, *(f"{name}*" for name in _LEGAL)]


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


def is_same(asked: Source, found: Source) -> bool:
    """Return whether a manifest's source is the one asked for. Makes no request: it still is after its branch moved."""
    if asked.kind == "folder":
        return (found.kind, found.revision) == ("folder", asked.revision)
    revisions = (found.asked_revision, found.revision)
    return (found.kind, found.model) == ("hub", asked.model) and asked.asked_revision in revisions


def fetch(model: str, asked: Source) -> tuple[Path, Source]:
    """Return the folder of a source, if need be downloaded, and the source with its commit. Raises PrepareError."""
    if asked.kind == "folder":
        return Path(model).expanduser().resolve(), asked
    if not sys.stderr.isatty():
        disable_progress_bars()
    commit, sizes = asked.asked_revision, None
    with _hub_errors(model, asked.asked_revision):
        if not constants.is_offline_mode():
            # Not left to snapshot_download: if the hub is out of reach, that takes the last commit in the cache.
            info = HfApi().model_info(model, revision=commit, files_metadata=True)
            HfApi().resolve_revision(model, revision=commit)  # Stores the commit in the cache, for HF_HUB_OFFLINE.
            commit, sizes = info.sha, {file.rfilename: file.size or 0 for file in info.siblings or ()}
        # The small files first: an unsuitable checkpoint is refused before its weights are downloaded.
        folder = Path(snapshot_download(model, revision=commit, allow_patterns=_SMALL))
    say(f"{model} at {asked.revision} is commit {folder.name}")
    loaded, _ = choose_files(model, folder, sizes)
    needed = sum((sizes or {}).get(name, 0) for name in loaded if not (folder / name).exists())
    if (free := shutil.disk_usage(folder).free) < needed:
        raise PrepareError(f"{model} needs {needed / 1e9:.2f} GB in HF_HOME, which has {free / 1e9:.2f} GB left")
    with stage("downloading"), _hub_errors(model, folder.name):
        snapshot_download(model, revision=folder.name, allow_patterns=[*_SMALL, *loaded])
    return folder, Source("hub", model, folder.name, asked.asked_revision)


def choose_files(model: str, folder: Path, hub: Collection[str] | None = ()) -> tuple[list[str], list[str]]:
    """Return the names of the files that are loaded, and of those that are copied. hub: further names; None: unknown.

    Raises PrepareError unless it is a Llama in safetensors, complete and not quantized.
    """
    config = _json(model, folder / _CONFIG)
    if config.get("model_type") != "llama":
        raise PrepareError(f"{model} is a {config.get('model_type')!r} checkpoint; this project serves 'llama'")
    if config.get("quantization_config"):
        raise PrepareError(f"{model} is quantized already: there is nothing to prepare, serve it as it is")
    names = {*(path.name for path in folder.iterdir() if path.is_file()), *(hub or ())}
    loaded = [_CONFIG, _WEIGHTS]
    if _INDEX in names and _WEIGHTS not in names:  # transformers, too, prefers a single file to an index.
        weight_map = _json(model, folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise PrepareError(f"{model}: {_INDEX} has no weight_map")
        loaded = [_CONFIG, _INDEX, *sorted({str(name) for name in weight_map.values()})]
    if hub is not None and (missing := sorted({*loaded} - names)):
        if missing[0] == _WEIGHTS:
            raise PrepareError(f"{model} has no {_WEIGHTS}: weights in safetensors are needed, as pickles can run code")
        raise PrepareError(f"{model} lacks {len(missing)} of {len(loaded) - 2} files of weights, first {missing[0]}")
    return loaded, [name for name in sorted(names) if name in _KEPT or name.startswith(_LEGAL)]


def _json(model: str, path: Path) -> dict[str, Any]:
    try:
        return {**json.loads(path.read_bytes())}
    except FileNotFoundError as error:
        raise PrepareError(f"{model} has no {path.name}: it is no checkpoint") from error
    except (ValueError, TypeError) as error:
        raise PrepareError(f"{model}: {path.name} is not a JSON object: {error}") from error


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Turn the errors of huggingface_hub and of the transport below it into PrepareErrors of one line."""
    asked = f"{model} at {revision or 'its default branch'}"
    try:
        yield
    except Exception as error:  # The transport has error classes of its own, and so has the library below it.
        match error:
            case errors.HFValidationError():
                reason = f"{model!r} is neither an existing folder nor a hub id (organisation/name)"
            case errors.GatedRepoError():
                access = "the account of HF_TOKEN has no access yet" if get_token() else "HF_TOKEN isn't set"
                reason = f"{model} is gated, and {access}: accept its terms, and set HF_TOKEN to that account's token"
            case errors.RepositoryNotFoundError():
                reason = f"the hub has no {model}, or it is private: check the id, or set HF_TOKEN"
            case errors.RevisionNotFoundError():
                reason = f"{model} has no revision {revision!r} on the hub"
            case OSError(errno=int()):
                reason = f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror}"
            case OSError() if constants.is_offline_mode():
                reason = f"{asked} isn't in the cache as a whole, and HF_HUB_OFFLINE is set"
            case _:
                cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
                reason = f"{asked} can't be fetched: {one_line(cause)}"
        raise PrepareError(reason) from error
