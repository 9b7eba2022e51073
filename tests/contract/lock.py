"""Read deploy/docker/requirements.lock: the image's Python packages and the files that may be installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contract.code_blocks import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = ROOT / "deploy" / "docker" / "requirements.lock"

CUDA = re.compile(r"nvidia-[a-z0-9-]+|cuda-[a-z]+|triton")
"""Packages of PyTorch's CUDA build; constraints.txt is made with its CPU build."""

_ENTRY = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?P<hashes>( --hash=sha256:[0-9a-f]{64})+)")


@dataclass(frozen=True)
class Locked:
    """A package of the image, with the hash of every file of this version that may be installed."""

    version: str
    hashes: tuple[str, ...]


def read_lock(file: Path = LOCK) -> Mapping[str, Locked]:
    """Return every package by canonical name. Raises ValueError for a line without version or hash."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    found: dict[str, Locked] = {}
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        entry = _ENTRY.fullmatch(line.strip())
        if entry is None:
            raise ValueError(f"{file.name}: not a package with its version and its hashes: {line[:100]}")
        name = canonicalize_name(entry["name"])
        if name in found:
            raise ValueError(f"{file.name}: {name} is listed twice")
        hashes = re.findall(r"sha256:([0-9a-f]{64})", entry["hashes"])
        found[name] = Locked(entry["version"], tuple(hashes))
    return found


def pinned(lines: list[str]) -> dict[str, str]:
    """Return versions by canonical name. Raises ValueError for a requirement that is not name==version."""
    versions: dict[str, str] = {}
    for line in lines:
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        if specifier.operator != "==":
            raise ValueError(f"{line}: not one version")
        versions[canonicalize_name(requirement.name)] = specifier.version
    return versions
