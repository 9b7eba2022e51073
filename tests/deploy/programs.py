"""Commands that are run within a time limit, and programs from Debian's packages.

The packages are unpacked into a cache and not installed. apt verifies their signatures.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from made_once import made_once

SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
APT_S = 240.0
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triton-llama"


def programs_or_skip(package: str, names: Sequence[str], release: str = "") -> list[Path]:
    """Return programs on PATH, else those of Debian's package; without them the test is skipped, or fails in CI.

    release: Debian's codename, by default this machine's.
    """
    installed = [shutil.which(name) for name in names]
    if all(installed):
        return [Path(str(program)) for program in installed]

    def unpack(folder: Path) -> Path:
        run(["dpkg-deb", "-x", _download(package, folder, release), folder / "root"], timeout=60)
        return folder / "root"

    try:
        binaries = made_once(CACHE / package, unpack) / "usr" / "bin"
    except (OSError, CommandFailedError) as error:
        reason = f"{' and '.join(names)}: neither on PATH nor Debian's package: {' '.join(str(error).split())}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return [binaries / name for name in names]


def _download(package: str, temporary: Path, release: str) -> Path:
    """Return the .deb file, chosen by current package lists."""
    for name in ("lists", "cache", "parts", "debs"):
        (temporary / name).mkdir()
    # apt's own user may lack the right to write here.
    options = ["APT::Sandbox::User=root", f"Dir::State::lists={temporary}/lists", f"Dir::Cache={temporary}/cache"]
    if release:
        sources = temporary / "release.sources"
        sources.write_text(re.sub(r"(?m)^Suites:.*", f"Suites: {release}", SOURCES.read_text().split("\n\n")[0]))
        package = f"{package}/{release}"
        options += [f"Dir::Etc::sourcelist={sources}", f"Dir::Etc::sourceparts={temporary}/parts"]
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    run([*apt, "update"], timeout=APT_S)
    run([*apt, "download", package], timeout=APT_S, directory=temporary / "debs")
    (deb,) = (temporary / "debs").iterdir()
    return deb


class CommandFailedError(Exception):
    """A command failed or timed out; the message holds all of its output."""


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `command` for at most `timeout` seconds and return its output as text.

    Raises CommandFailedError on a timeout and, with `check`, on an exit code other than 0.
    """
    # The program `timeout` ends a whole group: docker's plugins are its children, and must not outlive the limit.
    words = ["timeout", "--signal=KILL", str(timeout), *map(str, command)]
    ended = subprocess.run(
        words,
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    timed_out = ended.returncode == -signal.SIGKILL
    if timed_out or (check and ended.returncode != 0):
        failure = f"timed out after {timeout:g} s" if timed_out else f"exit code {ended.returncode}"
        output = f"--- stdout\n{ended.stdout}\n--- stderr\n{ended.stderr}"
        raise CommandFailedError(f"{failure}: {shlex.join(words)}\n{output}")
    return ended
