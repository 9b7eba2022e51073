"""Programs from Debian's packages, unpacked into a cache and not installed. apt verifies the packages' signatures."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import pytest
from compose.commands import run

SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
APT_S = 240.0


def unpacked(package: str, folder: Path, release: str = "") -> Path:
    """Return `folder` with a package's files; made once. release: Debian's codename, by default this machine's.

    Raises OSError or CommandFailedError if the package can't be had.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
            (deb,) = _download([package], Path(temporary), release).iterdir()
            run(["dpkg-deb", "-x", deb, f"{temporary}/root"], timeout=60)
            _place(Path(temporary, "root"), folder)
    return folder


def downloaded(packages: Sequence[str], folder: Path) -> Path:
    """Return `folder` with the .deb files of these packages; made once. Errors as for `unpacked`."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
            _place(_download(packages, Path(temporary), ""), folder)
    return folder


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test; in CI, fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def _place(complete: Path, folder: Path) -> None:
    try:
        complete.rename(folder)
    except OSError:
        # Another process was faster.
        if not folder.is_dir():
            raise


def _download(packages: Sequence[str], temporary: Path, release: str) -> Path:
    """Return a folder with the .deb files, chosen by current package lists."""
    for name in ("lists", "cache", "parts", "debs"):
        (temporary / name).mkdir()
    # apt's own user may lack the right to write here.
    options = ["APT::Sandbox::User=root", f"Dir::State::lists={temporary}/lists", f"Dir::Cache={temporary}/cache"]
    if release:
        sources = temporary / "release.sources"
        sources.write_text(re.sub(r"(?m)^Suites:.*", f"Suites: {release}", SOURCES.read_text().split("\n\n")[0]))
        packages = [f"{package}/{release}" for package in packages]
        options += [f"Dir::Etc::sourcelist={sources}", f"Dir::Etc::sourceparts={temporary}/parts"]
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    run([*apt, "update"], timeout=APT_S)
    run([*apt, "download", *packages], timeout=APT_S, directory=temporary / "debs")
    return temporary / "debs"
