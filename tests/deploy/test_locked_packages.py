"""Each Python package of the image has one version, the same in lock, pyproject and constraints, and its hashes."""

from __future__ import annotations

import re
import tomllib

import pytest
from deploy.code_blocks import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
LOCK = (ROOT / "deploy" / "docker" / "requirements.lock").read_text()
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)
LOCKED = {canonicalize_name(name): version for name, version, _ in ENTRY.findall(LOCK)}
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_THE_IMAGE = ("server", "guided", "kv-events", "tracing", "openai")

CUDA = re.compile(r"nvidia-[a-z0-9-]+|cuda-[a-z]+|triton")
"""Packages of PyTorch's CUDA build; constraints.txt is made with its CPU build."""


def test_the_lock_pins_what_constraints_pin() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    constraints = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
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
