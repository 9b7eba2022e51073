"""Finds perf_analyzer: on PATH if one runs there, else in the launcher's cache, fetched with pip on first use.

The package index's `perf-analyzer` is an empty placeholder; the binary is in wheels of `tritonclient`, up to 2.60. This
one is as old as the server of nvidia-pytriton and runs wherever that does; later ones need a newer glibc. It was linked
against two libraries that few machines have. Both are in the nvidia-pytriton wheel under hashed names; a folder of
links gives them the names that the binary asks for.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_local.installation import Interpreter, find_wheel
from triton_local.runtime import cache_root

NAME = "perf_analyzer"
LIBRARIES = ("libb64.so.0d", "libcudart.so.12")
VERSION = "2.51.0"
REQUIREMENT = f"tritonclient=={VERSION}"
PLATFORM = "manylinux1_x86_64"
SHA256 = "c485bb0123bdf310f90bc8b03d3489b28df2ffed55b30c7eee0b795b48113d52"
_FETCH_TIMEOUT_S = 600.0


class AnalyzerError(Exception):
    """Base of all errors of perf_analyzer; `str()` is the message for the user."""


class MissingAnalyzerError(AnalyzerError):
    """No perf_analyzer runs on this machine, and none can be fetched."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """A binary that runs here. libraries: a folder that it needs on LD_LIBRARY_PATH, or None."""

    executable: Path
    libraries: Path | None
    version: str

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the libraries."""
        return _with_libraries(self.libraries)


def find(environment: Mapping[str, str] = os.environ) -> PerfAnalyzer:
    """Return the one on PATH, else the cached one, fetched if missing.

    Raises MissingAnalyzerError if none runs and none can be fetched, MissingWheelError (a LauncherError) without the
    wheel that has its libraries.
    """
    on_path = shutil.which(NAME, path=environment.get("PATH", ""))
    if on_path is not None:
        try:
            return PerfAnalyzer(Path(on_path), None, _version(Path(on_path), None))
        except MissingAnalyzerError as error:
            print(f"{error}; using the one of {REQUIREMENT} instead", file=sys.stderr)
    cache = cache_root(environment)
    executable = fetched(cache)
    libraries = _libraries(find_wheel(Interpreter.current().site_packages).libraries, cache)
    return PerfAnalyzer(executable, libraries, _version(executable, libraries))


def fetched(cache: Path) -> Path:
    """Return the binary in the cache, fetched with pip if missing. Raises MissingAnalyzerError."""
    if platform.machine() != "x86_64":
        raise MissingAnalyzerError(f"{REQUIREMENT} has perf_analyzer for x86_64; this is {platform.machine()}")
    return placed(cache / f"{NAME}-{VERSION}", [NAME], _fetch) / NAME


def placed(target: Path, names: Sequence[str], build: Callable[[Path], None]) -> Path:
    """Return the folder `target` with these files; `build` fills it unless it exists. Atomic between processes.

    Raises MissingAnalyzerError if it can't be written, or exists without one of the files.
    """
    if all((target / name).exists() for name in names):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: an interrupted build must not pass for a complete one.
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    except OSError as error:
        raise MissingAnalyzerError(
            f"{target} can't be written ({error}): set TRITON_LLAMA_CACHE to a folder that can be written"
        ) from error
    try:
        build(building)
        try:
            os.rename(building, target)  # noqa: PTH104 - Path.rename does not document folders
        except OSError as error:
            # Another process may have been quicker, with the same content.
            if not all((target / name).exists() for name in names):
                raise MissingAnalyzerError(f"{target} is damaged ({error}): delete it") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _fetch(folder: Path) -> None:
    """Install the wheel into a temporary folder with pip, which checks the hash, and take the binary."""
    with tempfile.TemporaryDirectory(prefix="perf-analyzer-") as name:
        requirements = Path(name) / "requirements.txt"
        requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--only-binary=:all:", f"--platform={PLATFORM}", "--require-hashes"]
        command += [f"--target={name}/site", f"--requirement={requirements}"]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise MissingAnalyzerError(f"pip didn't get {REQUIREMENT} within {_FETCH_TIMEOUT_S:g} s") from error
        binary = Path(name) / "site" / "bin" / NAME
        if ran.returncode != 0 or not binary.is_file():
            raise MissingAnalyzerError(
                f"no perf_analyzer on PATH, and pip can't get {REQUIREMENT} ({PLATFORM}): {_reason(ran.stderr)}; "
                "put a perf_analyzer on PATH, or run this once with a package index within reach"
            )
        shutil.copyfile(binary, folder / NAME)
        (folder / NAME).chmod(0o755)


def _reason(stderr: str) -> str:
    """Return pip's error; of a hash mismatch, all of its lines."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if line.startswith("ERROR:")), None)
    if first is None:
        return lines[-1] if lines else "pip wrote nothing"
    return " ".join(line.removeprefix("ERROR: ") for line in lines[first:])


def _version(executable: Path, libraries: Path | None) -> str:
    command, environment = [str(executable), "--version"], _with_libraries(libraries)
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingAnalyzerError(f"{executable} can't be run: {error}") from error
    found = re.search(r"Version (\d\S*)", ran.stdout + ran.stderr)
    if ran.returncode != 0 or found is None:
        lines = (ran.stderr.strip() or ran.stdout.strip() or "no output").splitlines()
        raise MissingAnalyzerError(f"{executable} doesn't run here (exit code {ran.returncode}): {lines[0]}")
    return found[1]


def _libraries(source: Path, cache: Path) -> Path:
    """Return a folder in which the libraries have their own names."""
    links = {name: _hashed(source, name) for name in LIBRARIES}
    # Of the targets: another virtual environment has a folder of its own.
    digest = hashlib.sha256("\n".join(str(target) for target in links.values()).encode()).hexdigest()[:8]

    def build(folder: Path) -> None:
        for name, target in links.items():
            (folder / name).symlink_to(target)

    return placed(cache / f"{NAME}-libraries-{digest}", LIBRARIES, build)


def _hashed(source: Path, name: str) -> Path:
    """Find libb64-98cb6333.so.0d for libb64.so.0d: a repaired wheel's name has a hash after the first part."""
    stem, ending = name.split(".so", 1)
    pattern = f"{stem}-*.so{ending}*"
    found = sorted(source.glob(pattern))
    if len(found) != 1:
        raise MissingAnalyzerError(f"{NAME} needs {name}; {source} has {len(found)} files {pattern}, not one")
    return found[0]


def _with_libraries(libraries: Path | None) -> dict[str, str]:
    if libraries is None:
        return dict(os.environ)
    # An empty entry would mean the working directory.
    entries = [str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(entries)}
