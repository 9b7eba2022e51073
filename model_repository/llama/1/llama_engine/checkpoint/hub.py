"""Finds a checkpoint's folder or GGUF file: a local one, or a hub id's cached snapshot, downloaded if necessary.

Only the files of a checkpoint are downloaded, because repositories often also contain pickles and the weights in other
formats. A GGUF file of a repository is named as llama.cpp and Ollama name it: `owner/repository:Q4_K_M`, with or
without hf.co/ in front, or by its file name, `owner/repository/model.gguf`.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llama_engine.checkpoint.config import read_config
from llama_engine.checkpoint.files import INDEX, MODULES, POOLING, TRANSFORMER, WEIGHTS, weight_files
from llama_engine.checkpoint.lora import ADAPTER
from llama_engine.checkpoint.lora_config import CONFIG
from llama_engine.errors import CheckpointError, one_line

LICENCES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""Patterns of files that `triton_prepare` copies, because a licence may require it."""

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
    "additional_chat_templates/*.jinja",
    MODULES,
    TRANSFORMER,
    f"{POOLING}/config.json",
    INDEX,
    *LICENCES,
)
"""Patterns of the names of a checkpoint's files besides its weights."""


def resolve_folder(name: str, revision: str | None, show_progress: bool = False, with_weights: bool = True) -> Path:
    """Return the folder with all files of a checkpoint. name: folder, GGUF file or hub id. revision: the hub's.

    show_progress: show progress bars of a download. with_weights: download weights. If the hub is unreachable, cached
    files are used; with HF_HUB_OFFLINE only these are. Raises CheckpointError with the reason; an unsupported model is
    refused before its weights are downloaded.
    """
    gguf = parse_gguf_name(name)
    if Path(name).exists() or (gguf is None and Path(name).suffix == ".gguf"):
        return Path(name)
    # Imported here because most checkpoints are folders, and the import is slow.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not show_progress:
        disable_progress_bars()
    try:
        if gguf is not None:
            return _gguf_file(gguf, revision, with_weights)
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES]))
        if not (folder / "config.json").exists():
            raise CheckpointError(
                f"can't load {name}: it has no config.json; if it has GGUF files, name one, such as {name}:Q4_K_M"
            )
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


def resolve_adapter(source: str) -> Path:
    """Return the folder of a LoRA adapter. source: folder, or hub id, `owner/repository` or with `@revision`.

    A local path is returned unchecked: `read_adapter` refuses one that is no adapter's folder. If the hub is
    unreachable, cached files are used. Raises CheckpointError with the reason.
    """
    if _ADAPTER_NAME.fullmatch(source) is None or Path(source).exists():
        return Path(source)
    # Imported here because the import is slow.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    name, _, revision = source.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=[CONFIG, ADAPTER]))
    except Exception as error:
        # huggingface_hub and its HTTP library have no common base class of exceptions.
        raise CheckpointError(f"can't load {source}: {one_line(error)}") from error


def missing_weights(folder: Path) -> list[str]:
    """Return the names of a checkpoint's weight files that a folder lacks; a GGUF file lacks none."""
    if folder.is_file():
        return []
    return [path.name for path in weight_files(folder) or [folder / WEIGHTS] if not path.exists()]


class GgufName(NamedTuple):
    """A GGUF file on the hub. file: its name in the repository; or tag: the end of that name, such as Q4_K_M."""

    repository: str
    file: str
    tag: str

    def patterns(self) -> list[str]:
        """Return the patterns of the file and of its shards. Tags are in any case, file names in one."""
        if self.file:
            return [_FIRST_SHARD.sub(r"-?????\1", self.file)]
        tags = dict.fromkeys((self.tag, self.tag.upper(), self.tag.lower()))
        return [f"*[-._/]{tag}{end}" for tag in tags for end in (".gguf", "-?????-of-?????.gguf")]

    def find(self, folder: Path) -> Path:
        """Return the file, or its first shard, in a snapshot. Raises CheckpointError unless there is one."""
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.gguf"))}
        if self.file:
            found = [path for name, path in files.items() if name == self.file]
        else:
            named = re.compile(rf"[-._/]{re.escape(self.tag)}(-00001-of-\d{{5}})?\.gguf$", re.IGNORECASE)
            found = [path for name, path in files.items() if named.search(name)]
        wanted = self.file or f"a GGUF file that ends with {self.tag}"
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise CheckpointError(f"{self.repository} must have {wanted} once; it has {names}")
        return found[0]


_ADAPTER_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(@[\w./-]{1,96})?", re.ASCII)
_FIRST_SHARD = re.compile(r"-00001(-of-\d{5}\.gguf)$")
_GGUF_NAME = re.compile(r"(?:(?:hf\.co|huggingface\.co)/)?([\w.-]+/[\w.-]+)(?::([\w.-]+)|/(.+\.gguf))", re.ASCII)


def _gguf_file(gguf: GgufName, revision: str | None, with_weights: bool) -> Path:
    """Return a file in the hub's cache, downloaded if necessary, but not without `with_weights`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*SMALL_FILES, *gguf.patterns()]
    download = partial(snapshot_download, gguf.repository, revision=revision, allow_patterns=patterns)
    if with_weights:
        return gguf.find(Path(download()))
    try:
        return gguf.find(Path(download(local_files_only=True)))
    except (LocalEntryNotFoundError, CheckpointError) as error:
        raise CheckpointError(
            f"the GGUF file of {gguf.repository} isn't downloaded; `hf download` or a server's start does that"
        ) from error


def parse_gguf_name(name: str) -> GgufName | None:
    """Return the GGUF file that a hub id with a tag or a file name means, None for others."""
    match = _GGUF_NAME.fullmatch(name)
    return None if match is None else GgufName(match[1], match[3] or "", match[2] or "")
