"""Each Python package of the image has one version, the same in lock, pyproject and constraints, its hashes, and a
licence of the reviewed list, as pip-licenses reads it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from contract.code_blocks import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
LOCK = (ROOT / "deploy" / "docker" / "requirements.lock").read_text()
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)
LOCKED = {canonicalize_name(name): version for name, version, _ in ENTRY.findall(LOCK)}
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_THE_IMAGE = ("server", "guided", "openai")

CUDA = re.compile(r"nvidia-[a-z0-9-]+|cuda-[a-z]+|triton")
"""Packages of PyTorch's CUDA build; constraints.txt is made with its CPU build."""

# SPDX identifiers where a package has them, else classifiers and older forms.
ALLOWED = {
    *("MIT", "MIT License", "ISC", "ISC License", "ISC License (ISCL)", "BSL-1.0", "0BSD", "Unlicense", "Zlib"),
    *("BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "3-Clause BSD License"),
    *("Apache", "Apache 2.0", "Apache-2.0", "Apache 2.0 License", "Apache Software License"),
    *("Apache-2.0 WITH LLVM-exception", "ZPL-2.1", "CNRI-Python"),
    *("PSF-2.0", "Python Software Foundation License"),
    # Requires changed files of the package to be published; the image changes none.
    *("MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)"),
}


def _pinned(lines: list[str]) -> dict[str, str]:
    """Return versions by canonical name of lines name[extras]==version."""
    pairs = [re.sub(r"\[.*\]", "", line).split("==") for line in lines]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_entry_of_the_lock_has_one_version_with_hashes() -> None:
    # Neither an option, a range, an address nor an entry without hashes is left.
    assert [line for line in ENTRY.sub("", LOCK).splitlines() if not line.lstrip().startswith("#")] == []
    assert len(LOCKED) == len(ENTRY.findall(LOCK))
    assert "://" not in LOCK
    assert [name for name, version in LOCKED.items() if Version(version).local] == []


def test_the_lock_pins_what_the_project_pins() -> None:
    server = _pinned(EXTRAS["server"])
    assert server.keys() == {"torch", "transformers", "bitsandbytes", "accelerate", "numpy", "tritonclient"}
    assert server.items() <= LOCKED.items()
    constraints = _pinned((ROOT / "constraints.txt").read_text().split())
    # Of the CUDA packages only those that constraints.txt knows.
    known = {name: constraints.get(name) for name in LOCKED if name in constraints or not CUDA.fullmatch(name)}
    assert known == {name: LOCKED[name] for name in known}


@pytest.mark.parametrize("extra", OF_THE_IMAGE)
def test_the_lock_has_every_package_of_an_extra_of_the_image(extra: str) -> None:
    for requirement in map(Requirement, EXTRAS[extra]):
        assert LOCKED[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_image_installs_the_lock_alone() -> None:
    assert DOCKERFILE.count("pip install") == 1
    (install,) = re.findall(r"^ +python3 -m pip install (.*?);", DOCKERFILE, re.MULTILINE | re.DOTALL)
    words = install.replace("\\\n", " ").split()
    assert {"--require-hashes", "--only-binary=:all:", '--requirement="$lock"'} <= set(words)
    assert [word for word in words if not word.startswith("-")] == []
    assert "source=deploy/docker/requirements.lock,target=/mnt/requirements.lock" in DOCKERFILE


def test_every_package_but_cudas_has_a_licence_of_the_reviewed_list() -> None:
    """CUDA's have NVIDIA's own licence and are not installed with PyTorch's CPU build."""
    installed = {canonicalize_name(name) for distribution in metadata.distributions() if (name := distribution.name)}
    program = str(Path(sys.executable).with_name("pip-licenses"))
    command = [program, "--from=mixed", "--with-system", "--format=json", "--packages", *(LOCKED.keys() & installed)]
    listed = subprocess.check_output(command, text=True, timeout=60)
    licences = {canonicalize_name(package["Name"]): package["License"] for package in json.loads(listed)}
    assert [name for name in LOCKED if name not in licences and not CUDA.fullmatch(name)] == []
    unknown = {
        name: declared
        for name, declared in licences.items()
        if declared not in ALLOWED and not {*re.split(r"; | AND | OR ", re.sub(r"[()]", "", declared))} <= ALLOWED
    }
    assert unknown == {}
