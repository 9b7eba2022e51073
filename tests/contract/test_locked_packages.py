"""Each Python package of the image has one version, the same in lock, pyproject and constraints, and its hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from contract.code_blocks import ROOT
from contract.lock import CUDA, LOCK, pinned, read_lock
from packaging.version import Version

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
SERVER: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["server"]
CONSTRAINTS = pinned((ROOT / "constraints.txt").read_text().split())


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
