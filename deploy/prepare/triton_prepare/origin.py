"""The checkpoint that is to be prepared, in a folder or on the hub: identifies it, and has its files here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from llama_engine.model.manifest import Source, sha256_of

from triton_prepare.checkpoint_files import CheckpointFiles, find_files
from triton_prepare.errors import SourceError
from triton_prepare.hub import Hub
from triton_prepare.places import check_room
from triton_prepare.progress import Progress, say, stage


@dataclass(frozen=True)
class Origin:
    """A checkpoint whose files lie in a folder here, and what its manifest says of it."""

    folder: Path
    files: CheckpointFiles
    source: Source


class Original(Protocol):
    """What is asked for."""

    def is_source(self, source: Source) -> bool:
        """Return whether that is what was prepared, according to a manifest."""

    def describe(self) -> str:
        """Return it in a few words."""

    def fetch(self) -> Origin:
        """Have the files here. Raises PrepareError."""


@dataclass(frozen=True)
class FolderOriginal:
    """A checkpoint in a folder here, known by its content: wherever it lies, it is the same one."""

    folder: Path

    def is_source(self, source: Source) -> bool:
        """As in Original. Reads all files of the folder."""
        return (source.kind, source.revision) == ("folder", self._origin.source.revision)

    def describe(self) -> str:
        """As in Original."""
        return self._origin.source.describe()

    def fetch(self) -> Origin:
        """As in Original."""
        return self._origin

    @cached_property
    def _origin(self) -> Origin:
        names = {path.name for path in self.folder.iterdir() if path.is_file()}
        files = find_files(str(self.folder), names, lambda name: (self.folder / name).read_text())
        total = sum((self.folder / name).stat().st_size for name in files.all)
        with stage("reading the original", total) as progress:
            revision = f"sha256:{_digest(self.folder, files, progress)}"
        return Origin(self.folder, files, Source("folder", self.folder.name, revision, None))


@dataclass(frozen=True)
class HubOriginal:
    """A checkpoint on the hub, known by its id and the revision that is asked for; None is the default branch."""

    hub: Hub
    model: str
    revision: str | None

    def is_source(self, source: Source) -> bool:
        """As in Original. Asks nobody: of a branch that has moved on since, what it was then is what was asked for."""
        return (source.kind, source.model) == ("hub", self.model) and (
            self.revision in (source.asked_revision, source.revision)
        )

    def describe(self) -> str:
        """As in Original."""
        return f"{self.model} at {self.revision or 'its default branch'}"

    def fetch(self) -> Origin:
        """As in Original. The small files come first: what can't be prepared isn't downloaded."""
        listing = self.hub.look_up(self.model, self.revision)
        say(f"{self.describe()} is commit {listing.commit}")
        files = find_files(self.model, listing.files, lambda name: self.hub.read(listing, name))
        total = sum(listing.files[name] for name in files.all)
        check_room(self.hub.cache, total, f"the download of {self.model}")
        with stage("downloading" if total else "finding it in the cache", total) as progress:
            folder = self.hub.fetch(listing, files.all, progress)
        return Origin(folder, files, Source("hub", self.model, listing.commit, self.revision))


def original(model: str, revision: str | None, hub: Hub) -> Original:
    """Return what is meant by a folder or a hub id. Raises SourceError for a path that leads nowhere."""
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise SourceError(f"revision is {revision!r}, but {model} is a folder: only a hub id has revisions")
        return FolderOriginal(path.resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") > 1 or path.exists():
        raise SourceError(f"model is {model!r}: no such folder")
    return HubOriginal(hub, model, revision)


def _digest(folder: Path, files: CheckpointFiles, progress: Progress) -> str:
    """Return one digest of all files and their names."""
    lines = [f"{sha256_of(folder / name, progress)}  {name}\n" for name in sorted(files.all)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
