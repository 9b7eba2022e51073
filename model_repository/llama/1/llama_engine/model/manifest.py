"""A prepared checkpoint's manifest: what was quantized once, out of what, and which files came of it.

`triton_prepare` writes it when it has verified the files; here it is read and held against them. A checkpoint without
one is an ordinary one. Knows files and digests, nothing about tensors.
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
    """What was quantized.

    model: the hub id, or a folder's name. revision: the commit; of a folder "sha256:" and a digest of its files.
    asked_revision: of a hub id, as it was asked for; None is the default branch, and any folder's.
    """

    kind: str
    model: str
    revision: str
    asked_revision: str | None

    def describe(self) -> str:
        """Return it in a few words."""
        return f"{'the folder ' if self.kind == 'folder' else ''}{self.model} revision {self.revision}"


@dataclass(frozen=True)
class PreparedFile:
    """One file as it was written. sha256: in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is known of a prepared checkpoint.

    settings: how it was quantized. versions: of the packages that did it. date: ISO 8601, UTC. files: every file of the
    folder but the manifest itself, by its name.
    """

    source: Source
    settings: Mapping[str, str | float]
    versions: Mapping[str, str]
    date: str
    files: Mapping[str, PreparedFile]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return a folder's manifest; None if it has none, or another program's.

        Raises CheckpointError for one that can't be read.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
        # Other tools have files of this name as well.
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
        """Return the manifest as its file has it."""
        return json.dumps({"kind": _KIND, "format": _FORMAT, **asdict(self)}, indent=1) + "\n"

    def describe(self) -> str:
        """Return it as one line, for the log."""
        return (
            f"prepared checkpoint, quantized from {self.source.describe()}, on {self.date[:10]} "
            f"with bitsandbytes {self.versions.get('bitsandbytes', 'unknown')}"
        )

    def check_revision(self, asked: str | None) -> None:
        """Raise CheckpointError if a revision is asked for that isn't the one this was made of."""
        if asked is not None and asked not in (self.source.revision, self.source.asked_revision):
            raise CheckpointError(
                f"revision is {asked!r}, but the checkpoint was prepared from {self.source.describe()}"
            )

    def check_sizes(self, folder: Path) -> None:
        """Raise CheckpointError for a file that is missing or of another size: a copy that was cut short, mostly.

        Takes no time, however large the files are.
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
        """Raise CheckpointError for a file whose content isn't what was prepared. Reads every byte.

        progress: is told how many more bytes were read.
        """
        for name, file in self.files.items():
            found = sha256_of(folder / name, progress)
            if found != file.sha256:
                raise CheckpointError(
                    f"{folder / name} has changed since it was prepared: its SHA-256 is {found}, not {file.sha256}"
                )

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.bytes for file in self.files.values())


def checked(folder: Path, revision: str | None) -> Manifest | None:
    """Return the manifest of a checkpoint that is about to be loaded, held against its files; None without one.

    Raises CheckpointError where they don't agree, or another revision is asked for.
    """
    manifest = Manifest.read(folder)
    if manifest is not None:
        manifest.check_revision(revision)
        manifest.check_sizes(folder)
    return manifest


def sha256_of(path: Path, progress: Callable[[int], object]) -> str:
    """Return a file's SHA-256 in hexadecimal. progress: is told how many more bytes were read. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()
