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
from contract.lock import CUDA, LOCK, pinned, read_lock
from packaging.utils import canonicalize_name
from packaging.version import Version

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
SERVER: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["server"]
CONSTRAINTS = pinned((ROOT / "constraints.txt").read_text().split())

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

INSTALLED = {canonicalize_name(name) for distribution in metadata.distributions() if (name := distribution.name)}


def test_the_lock_pins_the_six_packages_as_pyproject_does() -> None:
    wanted = pinned(SERVER)
    assert len(wanted) == 6
    locked = read_lock()
    assert {name: locked[name].version for name in wanted} == wanted


def test_the_lock_pins_dependencies_as_constraints_does() -> None:
    locked = read_lock()
    others = {name for name in locked if not CUDA.fullmatch(name)}
    assert {name: locked[name].version for name in others} == {name: CONSTRAINTS[name] for name in others}
    # Of the CUDA packages only those that constraints.txt knows.
    both = locked.keys() & CONSTRAINTS.keys()
    assert {name: locked[name].version for name in both} == {name: CONSTRAINTS[name] for name in both}


def test_no_package_is_a_local_build() -> None:
    assert {name: one.version for name, one in read_lock().items() if Version(one.version).local} == {}


def test_the_lock_names_no_package_index() -> None:
    assert not re.search(r"://|^-", LOCK.read_text(), re.MULTILINE)


def test_the_image_installs_the_lock_and_nothing_else() -> None:
    assert DOCKERFILE.count("pip install") == 1
    (install,) = re.findall(r"^ +python3 -m pip install (.*?);", DOCKERFILE, re.MULTILINE | re.DOTALL)
    words = install.replace("\\\n", " ").split()
    assert {"--require-hashes", "--only-binary=:all:", '--requirement="$lock"'} <= set(words)
    assert [word for word in words if not word.startswith("-")] == []
    assert "source=deploy/docker/requirements.lock,target=/mnt/requirements.lock" in DOCKERFILE
    # Wheels with other hashes bring their own lock; there is no way without one.
    assert re.findall(r"\block=(\S+?);", DOCKERFILE) == ["/mnt/requirements.lock", "/mnt/wheels/requirements.lock"]


def test_the_image_downloads_nothing_by_other_means() -> None:
    assert not re.search(r"\b(apt-get|apk|curl|wget|git clone|npm)\b|^ADD\b", DOCKERFILE, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"scratch", "${TRITON_IMAGE}"}


@pytest.mark.parametrize(
    "line",
    [
        "torch>=2 --hash=sha256:" + "a" * 64,
        "torch==2.13.0",
        "torch==2.13.0 --hash=sha256:" + "a" * 63,
        "torch==2.13.0 --hash=md5:" + "a" * 32,
        "torch @ file:///torch.whl --hash=sha256:" + "a" * 64,
        "--index-url x",
        "a==1 --hash=sha256:" + "a" * 64 + "\na==2 --hash=sha256:" + "b" * 64,
    ],
)
def test_reading_a_lock_refuses_a_line_without_version_or_hash(tmp_path: Path, line: str) -> None:
    file = tmp_path / "requirements.lock"
    file.write_text(f"# made by make lock\n{line}\n")
    with pytest.raises(ValueError, match=r"^requirements\.lock: "):
        read_lock(file)


def _listed(names: list[str]) -> dict[str, list[str]]:
    """Return the licences that these packages declare, by canonical name."""
    program = Path(sys.executable).with_name("pip-licenses")
    shown = subprocess.run(
        [program, "--from=mixed", "--with-system", "--format=json", "--packages", *names],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    return {
        canonicalize_name(one["Name"]): re.split(r"; | AND | OR ", re.sub(r"[()]", "", one["License"]))
        if one["License"] not in ALLOWED
        else [one["License"]]
        for one in json.loads(shown)
    }


@pytest.fixture(scope="module")
def licences() -> dict[str, list[str]]:
    return _listed([name for name in read_lock() if name in INSTALLED])


def test_every_licence_is_on_the_reviewed_list(licences: dict[str, list[str]]) -> None:
    unknown = {name: sorted({*found} - ALLOWED) for name, found in licences.items() if {*found} - ALLOWED}
    assert unknown == {}


def test_every_package_of_the_lock_is_covered_except_cudas(licences: dict[str, list[str]]) -> None:
    """CUDA's have NVIDIA's own licence and are not installed with PyTorch's CPU build."""
    assert {name for name in read_lock() if name not in licences and not CUDA.fullmatch(name)} == set()
