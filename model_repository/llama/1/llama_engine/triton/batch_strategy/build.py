"""Compiles Triton's batch strategy to `batchstrategy.so` in the version folders of llama and, where it is, llama_unary.

    PYTHONPATH=model_repository/llama/1 python3 -B -m llama_engine.triton.batch_strategy.build [--optional] [--quiet]

As for the CPU kernels (`kernels.cpu.build`), the compiler is CXX, else g++, c++ or clang++, a whole library of these
sources is kept, and one is renamed into place when it is complete. It needs the C library alone.

Exit status: 0, or 1 when a folder has no library, because there is no compiler, it compiles nothing or the folder can't
be written; with --optional always 0.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from pathlib import Path

from llama_engine.kernels.cpu.build import compile_to, find_compiler, is_whole

SOURCE = Path(__file__).parent / "batchstrategy.cpp"
NAME = "batchstrategy.so"
"""As Triton looks for it."""

VERSION = SOURCE.parents[3]
FOLDERS = (VERSION, VERSION.parents[1] / "llama_unary" / "1")

FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-Wl,--as-needed")


def digest() -> str:
    """Return a hash of the source, the flags and this machine's kind; the library contains it."""
    return hashlib.sha256(" ".join([*FLAGS, platform.machine()]).encode() + SOURCE.read_bytes()).hexdigest()[:16]


def is_built(folder: Path = VERSION) -> bool:
    """Return whether a folder has a whole library of the source as it is now."""
    library = folder / NAME
    return library.exists() and is_whole(library) and digest().encode() in library.read_bytes()


def folders_without_library() -> list[Path]:
    """Return the version folders that are there and have no library of the source as it is now."""
    return [folder for folder in FOLDERS if folder.is_dir() and not is_built(folder)]


def compile_library(compiler: list[str] | None, folder: Path) -> str | None:
    """Compile the library unless a folder has it. Return in a line why that fails, None otherwise."""
    if is_built(folder):
        return None
    try:
        # One of other sources may have another protocol than the model, and a truncated one ends Triton.
        (folder / NAME).unlink(missing_ok=True)
    except OSError as error:
        return f"{folder} can't be written: {error.strerror}"
    if compiler is None:
        return "no C++ compiler"
    return compile_to(folder / NAME, [*compiler, *FLAGS, f'-DSOURCE="{digest()}"', str(SOURCE)])


def main() -> int:
    """Compile the library into every folder; return the exit status."""
    parser = argparse.ArgumentParser(description="Compile Triton's batch strategy.")
    parser.add_argument("--optional", action="store_true", help="exit with 0 even if nothing can be compiled")
    parser.add_argument("--quiet", action="store_true", help="print nothing if nothing is to be compiled")
    options = parser.parse_args()
    folders = [folder for folder in FOLDERS if folder.is_dir()]
    stale = folders_without_library()
    compiler = find_compiler()
    failed = [(folder, why) for folder in stale if (why := compile_library(compiler, folder)) is not None]
    for folder, why in failed:
        print(
            f"batch strategy not built: {why}; without {folder / NAME} a malformed request fails its whole batch",
            file=sys.stderr,
        )
    if not failed and (stale or not options.quiet):
        print(f"batch strategy: {', '.join(str(folder / NAME) for folder in folders)}")
    return 1 if failed and not options.optional else 0


if __name__ == "__main__":
    sys.exit(main())
