"""Compiles the CPU kernels: one shared object per instruction set, in `build/` beside this file.

    python3 model_repository/llama/1/llama_engine/kernels/cpu/build.py [--optional] [--quiet]

The compiler is the environment variable CXX, else g++, c++ or clang++. An object's name has a hash of the sources and
flags, so that a stale object is never loaded; it is renamed into place when it is complete, so that builds at the same
time do no harm; and it ends in a hash of its bytes, because loading a truncated object kills the process. An
instruction set that the compiler doesn't know is skipped with a line. Objects need no OpenMP when they are linked: its
one function comes from torch's runtime when they are loaded (see `library`). Whole objects of these sources are kept:
with nothing to compile it takes a twentieth of a second, so `make` runs it each time.

Exit status: 0, or 1 when there is no object, because there is no compiler, it compiles nothing or the folder can't be
written; with --optional always 0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__)
SOURCES = SCRIPT.parent
BUILD_DIRECTORY = SOURCES / "build"
COMPILERS = ("g++", "c++", "clang++")

COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fvisibility-inlines-hidden")

_AVX2 = ("-mavx2", "-mfma")
_AVX512_VNNI = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")

INSTRUCTION_SETS = {
    "avx512-amx": (*_AVX512_VNNI, "-mamx-tile", "-mamx-int8"),
    "avx512-vnni": _AVX512_VNNI,
    "avx2": _AVX2,
}
"""Compiler flags by instruction set, the fastest first."""

_HASH_BYTES = hashlib.sha256().digest_size

_COMPILER_TIMEOUT = 300
"""Seconds per object."""


def object_path(instruction_set: str, directory: Path = BUILD_DIRECTORY) -> Path:
    """Return the path of an instruction set's object as the sources are now."""
    digest = hashlib.sha256(" ".join((*COMMON_FLAGS, *INSTRUCTION_SETS[instruction_set])).encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return directory / f"{instruction_set}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> list[str] | None:
    """Return the C++ compiler's command, or None."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [[name] for name in COMPILERS]
    return next((command for command in candidates if shutil.which(command[0])), None)


def compile_object(compiler: list[str] | None, instruction_set: str, directory: Path = BUILD_DIRECTORY) -> str | None:
    """Compile an instruction set's object unless a whole one exists. Return in a line why it fails, None otherwise."""
    if is_built(instruction_set, directory):
        return None
    if compiler is None:
        return "no C++ compiler"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{directory} can't be written: {error.strerror}"
    command = [*compiler, *COMMON_FLAGS, *INSTRUCTION_SETS[instruction_set], str(SOURCES / "forward.cpp")]
    return compile_to(object_path(instruction_set, directory), command)


def compile_to(path: Path, command: Sequence[str]) -> str | None:
    """Run a compiler's command, and seal what it makes and rename it into place. Return in a line why that fails."""
    try:
        room = tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent)
    except OSError as error:
        return f"{path.parent} can't be written: {error.strerror}"
    with room as folder:
        complete = Path(folder) / "object"
        try:
            run = [*command, "-o", str(complete)]
            result = subprocess.run(run, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT)
            if result.returncode != 0:
                errors = [line for line in result.stderr.splitlines() if "error" in line]
                return errors[0] if errors else f"{command[0]} ended with code {result.returncode}"
            seal(complete)
            complete.chmod(0o755)
            complete.replace(path)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return None


def is_built(instruction_set: str, directory: Path = BUILD_DIRECTORY) -> bool:
    """Return whether an instruction set's object is complete and was built from the current sources."""
    path = object_path(instruction_set, directory)
    return path.exists() and is_whole(path)


def seal(path: Path) -> None:
    """Append the hash of a complete object to it; the loader ignores bytes after the last section."""
    path.write_bytes(path.read_bytes() + hashlib.sha256(path.read_bytes()).digest())


def is_whole(path: Path) -> bool:
    """Return whether an object ends in the hash of its bytes."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-_HASH_BYTES]).digest() == content[-_HASH_BYTES:]


def remove_stale(directory: Path = BUILD_DIRECTORY) -> None:
    """Delete complete objects of other sources or flags."""
    current = {object_path(name, directory) for name in INSTRUCTION_SETS}
    for path in directory.glob("[!.]*.so"):
        if path not in current:
            path.unlink(missing_ok=True)


def main() -> int:
    """Compile every instruction set; return the exit status."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument("--optional", action="store_true", help="exit with 0 even if nothing can be compiled")
    parser.add_argument("--quiet", action="store_true", help="print nothing if nothing is to be compiled")
    options = parser.parse_args()
    # Objects need any glibc and nothing else, so those that another machine made of these sources do as well.
    there = [name for name in INSTRUCTION_SETS if is_built(name)]
    compiler = find_compiler()
    if compiler is None and not there:
        wanted = os.environ.get("CXX") or ", ".join(COMPILERS)
        print(
            f"CPU kernels not built: no C++ compiler ({wanted}); the model runs on PyTorch's kernels", file=sys.stderr
        )
        return 0 if options.optional else 1
    built: list[str] = []
    skipped: dict[str, list[str]] = {}
    for name in INSTRUCTION_SETS:
        message = None if name in there else compile_object(compiler, name)
        if message is None:
            built.append(name)
        else:
            skipped.setdefault(message, []).append(name)
    for message, names in skipped.items():
        print(f"CPU kernels for {', '.join(names)} skipped: {message}", file=sys.stderr)
    if not built:
        return 0 if options.optional else 1
    try:
        remove_stale()
    except OSError as error:
        print(f"CPU kernels of other sources stay in {BUILD_DIRECTORY}: {error.strerror}", file=sys.stderr)
    if not options.quiet or built != there:
        print(f"CPU kernels: {', '.join(built)} in {BUILD_DIRECTORY}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
