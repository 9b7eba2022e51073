"""Prometheus and promtool for the tests: those on PATH, else Debian's, whose binaries need the C library only."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from compose.commands import CommandFailedError, run
from contract.debian_packages import skip_or_fail, unpacked
from triton_local.runtime import cache_root


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
    server, promtool = shutil.which("prometheus"), shutil.which("promtool")
    if server and promtool:
        return Prometheus(Path(server), Path(promtool))
    try:
        programs = unpacked("prometheus", cache_root(os.environ) / "prometheus") / "usr" / "bin"
    except (OSError, CommandFailedError) as error:
        skip_or_fail(f"neither prometheus and promtool on PATH nor Debian's package: {' '.join(str(error).split())}")
    return Prometheus(programs / "prometheus", programs / "promtool")
