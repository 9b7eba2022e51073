"""perf_analyzer out of the wheel of Triton's client that has it, by name, version and SHA-256.

The package index's `perf-analyzer` is an empty placeholder; the binary is in wheels of `tritonclient`, up to 2.60. This
one is as old as the server of nvidia-pytriton and runs wherever that does; later ones ask for a newer glibc. The wheel
isn't installed: one file is taken out of it.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from perf.analyzer.errors import MissingAnalyzerError
from perf.analyzer.placing import placed

VERSION = "2.51.0"
REQUIREMENT = f"tritonclient=={VERSION}"
PLATFORM = "manylinux1_x86_64"
SHA256 = "c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52"
MEMBER = f"tritonclient-{VERSION}.data/data/bin/perf_analyzer"
_DOWNLOAD_TIMEOUT_S = 600.0


def fetched(cache: Path) -> Path:
    """Return the binary in the cache; download the wheel if it isn't there yet. Raises MissingAnalyzerError."""
    if platform.machine() != "x86_64":
        raise MissingAnalyzerError(f"{REQUIREMENT} has perf_analyzer for x86_64; this is {platform.machine()}")
    return placed(cache / f"perf_analyzer-{VERSION}", ["perf_analyzer"], _build) / "perf_analyzer"


def _build(folder: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="perf-analyzer-") as downloads,
        zipfile.ZipFile(_downloaded(Path(downloads))) as wheel,
    ):
        (folder / "perf_analyzer").write_bytes(wheel.read(MEMBER))
    (folder / "perf_analyzer").chmod(0o755)


def _downloaded(folder: Path) -> Path:
    """Download the wheel with pip, from wherever pip is configured to; pip itself refuses another hash."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    what = ["--no-deps", "--only-binary=:all:", f"--platform={PLATFORM}", "--require-hashes"]
    try:
        ran = subprocess.run(
            [*command, *what, f"--dest={folder}", f"--requirement={requirements}"],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MissingAnalyzerError(f"pip didn't get {REQUIREMENT} within {_DOWNLOAD_TIMEOUT_S:g} s") from error
    found = list(folder.glob("*.whl"))
    if ran.returncode != 0 or len(found) != 1:
        raise MissingAnalyzerError(
            f"no perf_analyzer on PATH, and pip can't get {REQUIREMENT} ({PLATFORM}): {_reason(ran.stderr)}; "
            "put a perf_analyzer on PATH, or run this once with a package index within reach"
        )
    return found[0]


def _reason(stderr: str) -> str:
    """Return what pip calls the error; of a wrong hash, all of the lines that say so."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if line.startswith("ERROR:")), None)
    if first is None:
        return lines[-1] if lines else "it said nothing"
    return " ".join(line.removeprefix("ERROR: ") for line in lines[first:])
