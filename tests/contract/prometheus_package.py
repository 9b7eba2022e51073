"""Prometheus and promtool for the tests: those on PATH, else Debian's package, unpacked into a cache.

The binaries need the C library only. apt verifies the package's signature.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from compose.commands import CommandFailedError, run
from triton_local.runtime import cache_root

PACKAGE = "prometheus"
APT_S = 240.0


@dataclass(frozen=True)
class Prometheus:
    """The two programs of one release."""

    server: Path
    promtool: Path

    def check(self, *arguments: str | Path) -> str:
        """Run promtool; return its output. Raises CommandFailedError if it fails."""
        return run([self.promtool, *arguments], timeout=60).stdout


def prometheus_or_skip() -> Prometheus:
    """Return the programs; without them the test is skipped, or fails in CI."""
    try:
        return _on_path() or _unpacked(cache_root(os.environ) / "prometheus")
    except (OSError, CommandFailedError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"neither prometheus and promtool on PATH nor Debian's package: {' '.join(str(error).split())}")


def _on_path() -> Prometheus | None:
    server, promtool = shutil.which("prometheus"), shutil.which("promtool")
    return Prometheus(Path(server), Path(promtool)) if server and promtool else None


def _unpacked(folder: Path) -> Prometheus:
    if not folder.is_dir():
        # A temporary name until it is complete, so that an interrupted download is never used.
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        partial.mkdir(parents=True)
        try:
            run(["dpkg-deb", "-x", _downloaded(partial / "deb"), partial / "root"], timeout=60)
            shutil.rmtree(partial / "deb")
            _place(partial / "root", folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return Prometheus(folder / "usr" / "bin" / "prometheus", folder / "usr" / "bin" / "promtool")


def _place(root: Path, folder: Path) -> None:
    try:
        root.rename(folder)
    except OSError:
        # Another process was faster.
        if not folder.is_dir():
            raise


def _downloaded(folder: Path) -> Path:
    """Download the package, with this machine's package lists if they are current, else with own ones."""
    # apt's own user may lack the right to write here.
    apt = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root"]
    own = [*apt, "-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}"]
    for name in ("lists", "cache"):
        (folder / name).mkdir(parents=True)
    try:
        run([*apt, "download", PACKAGE], timeout=APT_S, directory=folder)
    except CommandFailedError:
        run([*own, "update"], timeout=APT_S)
        run([*own, "download", PACKAGE], timeout=APT_S, directory=folder)
    (package,) = folder.glob(f"{PACKAGE}_*.deb")
    return package
