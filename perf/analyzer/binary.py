"""Where perf_analyzer is: on PATH if one runs there, else out of a wheel (`wheel.py`), kept in the launcher's cache.

The wheel's binary was linked against two libraries that few machines have. Both lie, under other names, among the
libraries of the nvidia-pytriton wheel; a folder of links gives them back the names that the binary asks for.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_local.interpreter import Interpreter
from triton_local.runtime import cache_root
from triton_local.wheel import find_wheel

from perf.analyzer import wheel
from perf.analyzer.errors import MissingAnalyzerError
from perf.analyzer.placing import placed

NAME = "perf_analyzer"
LIBRARIES = ("libb64.so.0d", "libcudart.so.12")
_VERSION = re.compile(r"Version (\d\S*)")


@dataclass(frozen=True)
class PerfAnalyzer:
    """One that runs here. libraries: a folder that it needs on LD_LIBRARY_PATH, None if it runs as it is."""

    executable: Path
    libraries: Path | None
    version: str

    def environment(self) -> dict[str, str]:
        """Return this process's environment with what it needs."""
        return _with_libraries(os.environ, self.libraries)


def find(environment: Mapping[str, str] = os.environ) -> PerfAnalyzer:
    """Return the one on PATH, else the cache's; fetch it if it isn't there yet.

    Raises MissingAnalyzerError if there is none that runs and none can be fetched, MissingWheelError (a LauncherError)
    without the wheel that has its libraries.
    """
    on_path = shutil.which(NAME, path=environment.get("PATH", ""))
    if on_path is not None:
        try:
            return PerfAnalyzer(Path(on_path), None, _version(Path(on_path), None))
        except MissingAnalyzerError as error:
            print(f"{error}; taking the one of {wheel.REQUIREMENT} instead", file=sys.stderr)
    cache = cache_root(environment)
    executable = wheel.fetched(cache)
    libraries = _libraries(find_wheel(Interpreter.current().site_packages).libraries, cache)
    return PerfAnalyzer(executable, libraries, _version(executable, libraries))


def _version(executable: Path, libraries: Path | None) -> str:
    """Run it and return its version."""
    try:
        ran = subprocess.run(
            [str(executable), "--version"],
            env=_with_libraries(os.environ, libraries),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingAnalyzerError(f"{executable} can't be run: {error}") from error
    said = _VERSION.search(ran.stdout + ran.stderr)
    if ran.returncode != 0 or said is None:
        lines = (ran.stderr.strip() or ran.stdout.strip() or "it said nothing").splitlines()
        raise MissingAnalyzerError(f"{executable} doesn't run here (exit code {ran.returncode}): {lines[0]}")
    return said[1]


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


def _with_libraries(environment: Mapping[str, str], libraries: Path | None) -> dict[str, str]:
    if libraries is None:
        return dict(environment)
    # An empty entry would mean the working directory.
    entries = [str(libraries), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    return {**environment, "LD_LIBRARY_PATH": os.pathsep.join(entries)}
