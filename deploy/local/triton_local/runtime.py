"""The folder that tritonserver runs from: links to the wheel's parts and the interpreter's libpython, made once.

    runtime-<wheel version>-<python version>-<digest>/
      backends/python/   the Python backend with the stub of this Python beside it
      caches/            the wheel's
      lib/               libpython only: other files of its folder must not hide the system's libraries

Links cost a few KB and follow a reinstalled wheel. The digest is of the link targets: two virtual environments don't
share a runtime, and one can be deleted without breaking the other.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_local.errors import CacheError
from triton_local.installation import STUB_NAME, Interpreter, TritonWheel

_PLACING_ATTEMPTS = 5


@dataclass(frozen=True)
class Runtime:
    """A complete runtime folder, and the interpreter and wheel that it links to."""

    root: Path
    wheel: TritonWheel
    interpreter: Interpreter

    @property
    def backends(self) -> Path:
        """For --backend-directory."""
        return self.root / "backends"

    @property
    def caches(self) -> Path:
        """For --cache-directory."""
        return self.root / "caches"

    @property
    def library_path(self) -> tuple[Path, ...]:
        """Folders for LD_LIBRARY_PATH."""
        return (self.root / "lib", self.wheel.libraries)


def cache_root(environment: Mapping[str, str]) -> Path:
    """Return TRITON_LLAMA_CACHE, else `triton-llama` under XDG_CACHE_HOME or ~/.cache; absolute."""
    if own := environment.get("TRITON_LLAMA_CACHE"):
        return Path(own).expanduser().absolute()
    # The XDG specification: a relative path in the variable is ignored.
    shared = Path(environment.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "triton-llama"


def prepare_runtime(wheel: TritonWheel, interpreter: Interpreter, cache: Path) -> Runtime:
    """Return the runtime of this wheel and interpreter in `cache`, built if it isn't there yet.

    Safe against concurrent processes. Raises UnsupportedInterpreterError,
    MissingLibpythonError, or CacheError when the cache can't be written.
    """
    links = _links(wheel, interpreter)
    digest = hashlib.sha256("\n".join(f"{name} {target}" for name, target in links.items()).encode()).hexdigest()[:8]
    root = cache / f"runtime-{wheel.version}-{interpreter.full_version}-{digest}"
    if not _is_complete(root, links):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _place(root, links)
        except OSError as error:
            raise CacheError(
                f"the runtime can't be kept in {cache} ({error}): "
                f"set TRITON_LLAMA_CACHE to a folder that can be written"
            ) from error
    return Runtime(root, wheel, interpreter)


def _links(wheel: TritonWheel, interpreter: Interpreter) -> dict[str, Path]:
    libpython = interpreter.libpython()
    backend = {f"backends/python/{part.name}": part for part in wheel.python_backend.iterdir() if part.is_file()}
    return {
        **dict(sorted(backend.items())),
        f"backends/python/{STUB_NAME}": wheel.stub(interpreter.minor_version),
        "caches": wheel.caches,
        f"lib/{libpython.name}": libpython,
    }


def _is_complete(root: Path, links: Mapping[str, Path]) -> bool:
    return all((root / name).exists() for name in links)


def _place(root: Path, links: Mapping[str, Path]) -> None:
    """Build under another name and rename, so that `root` is complete or absent."""
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=root.parent))
    try:
        for name, target in links.items():
            (building / name).parent.mkdir(parents=True, exist_ok=True)
            (building / name).symlink_to(target)
        for attempt in range(_PLACING_ATTEMPTS):
            try:
                os.rename(building, root)  # noqa: PTH104 - Path.rename doesn't document folders
                return
            except OSError:
                if _is_complete(root, links):  # another process was faster
                    return
                if attempt == _PLACING_ATTEMPTS - 1:
                    raise
                _move_away(root)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _move_away(damaged: Path) -> None:
    """Remove a runtime that has lost files."""
    grave = Path(tempfile.mkdtemp(prefix=".damaged-", dir=damaged.parent))
    try:
        damaged.rename(grave / damaged.name)
    except FileNotFoundError:
        return  # another process has just done it
    finally:
        shutil.rmtree(grave, ignore_errors=True)
