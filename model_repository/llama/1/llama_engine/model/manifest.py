"""The manifest of a prepared checkpoint: its source, the quantization settings, and its files with sizes and hashes.

`triton_prepare` quantizes a checkpoint, verifies the files and writes the manifest; the loader checks the files against
it. Ordinary checkpoints have no manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from llama_engine.errors import CheckpointError

MANIFEST = "manifest.json"

_KIND = "triton-llama prepared checkpoint"
_FORMAT = 1
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Source:
    """The checkpoint from which a prepared checkpoint was made.

    model: hub id, or a folder's name. revision: commit on the hub; for a folder, "sha256:" and a digest of its files.
    asked_revision: requested revision of a hub id; None for the default branch and for a folder.
    """

    kind: str
    model: str
    revision: str
    asked_revision: str | None

    def describe(self) -> str:
        """Return model and revision, for log and error messages."""
        return f"{'the folder ' if self.kind == 'folder' else ''}{self.model} revision {self.revision}"


@dataclass(frozen=True)
class PreparedFile:
    """Size in bytes and SHA-256, in hexadecimal, of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Describes a prepared checkpoint.

    settings: quantization settings. versions: versions of the packages used. date: ISO 8601, UTC. files: every file of
    the folder by name, except the manifest itself.
    """

    source: Source
    settings: Mapping[str, str | float]
    versions: Mapping[str, str]
    date: str
    files: Mapping[str, PreparedFile]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the folder's manifest, or None if it has none.

        Raises CheckpointError for an unreadable manifest.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
        # Other tools also write files of this name.
        if not isinstance(content, dict) or content.get("kind") != _KIND:
            return None
        if content.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is of format {content.get('format')}; this program reads {_FORMAT}")
        try:
            return cls(
                source=Source(**content["source"]),
                settings=dict(content["settings"]),
                versions=dict(content["versions"]),
                date=str(content["date"]),
                files={name: PreparedFile(**file) for name, file in content["files"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} isn't a whole manifest: {error!r}") from error

    def to_json(self) -> str:
        """Return the content of the manifest's file."""
        return json.dumps({"kind": _KIND, "format": _FORMAT, **asdict(self)}, indent=1) + "\n"

    def describe(self) -> str:
        """Return source, date and version as one line, for the log."""
        source = self.source.describe()
        if self.settings.get("quantization") == "checkpoint":
            return f"prepared checkpoint, copied from {source}, on {self.date[:10]}"
        version = self.versions.get("bitsandbytes", "unknown")
        return f"prepared checkpoint, quantized from {source}, on {self.date[:10]} with bitsandbytes {version}"

    def check_revision(self, revision: str | None) -> None:
        """Raise CheckpointError if the requested revision differs from the source's."""
        if revision is not None and revision not in (self.source.revision, self.source.asked_revision):
            raise CheckpointError(
                f"revision is {revision!r}, but the checkpoint was prepared from {self.source.describe()}"
            )

    def check_sizes(self, folder: Path) -> None:
        """Raise CheckpointError if a file is missing or has a different size, usually because a copy is truncated.

        Doesn't read the files' contents.
        """
        for name, file in self.files.items():
            path = folder / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} can't be read, and the manifest lists it: {error.strerror}") from error
            if size != file.bytes:
                raise CheckpointError(f"{path} has {size} bytes; when it was prepared it had {file.bytes}")

    def check_hashes(self, folder: Path, progress: Callable[[int], object]) -> None:
        """Raise CheckpointError if the hash of a file has changed. Reads every byte.

        progress: called with the number of bytes after each read.
        """
        for name, file in self.files.items():
            digest = sha256_of(folder / name, progress)
            if digest != file.sha256:
                raise CheckpointError(
                    f"{folder / name} has changed since it was prepared: its SHA-256 is {digest}, not {file.sha256}"
                )

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(file.bytes for file in self.files.values())


def verified_manifest(folder: Path, revision: str | None) -> Manifest | None:
    """Return the folder's manifest after checking revision and file sizes; None for an ordinary checkpoint.

    Raises CheckpointError if the manifest is unreadable, the revision differs, or a file is missing or has a different
    size.
    """
    manifest = Manifest.read(folder)
    if manifest is not None:
        manifest.check_revision(revision)
        manifest.check_sizes(folder)
    return manifest


def sha256_of(path: Path, progress: Callable[[int], object]) -> str:
    """Return a file's SHA-256 in hexadecimal. progress: called with the number of bytes after each read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()
