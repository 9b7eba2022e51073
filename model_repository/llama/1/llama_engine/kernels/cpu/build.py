"""Compiles the CPU kernels: one shared object per instruction set, in `build/` beside this file.

    python3 model_repository/llama/1/llama_engine/kernels/cpu/build.py [--optional] [--quiet]

The compiler is the environment variable CXX, else g++, c++ or clang++. An instruction set that it doesn't support is
skipped with a message. Objects are not linked with OpenMP: its one function is resolved from torch's runtime when an
object is loaded (see `library`).

An object's name contains a hash of the sources and flags, so that a stale object is never loaded. A complete object is
renamed into place, so that concurrent builds are safe. It ends in a hash of its bytes, because loading a truncated
object would crash the process. Up-to-date objects are not compiled again: `make` runs this each time, in 0.05 s.

A new object is tested (`self_test`) where torch is installed and the processor has its instructions, and deleted if it
fails; every object is tested when a model is loaded.

Exit status: 0; 1 if there is no object, because there is no compiler, compilation fails or the folder isn't writable;
with --optional always 0.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
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

# Sums of vectors wrap around.
COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fwrapv", "-fvisibility-inlines-hidden")

_AVX2 = ("-mavx2", "-mfma")
_AVX512_VNNI = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")

COMPILER_FLAGS = {
    "avx512-amx": (*_AVX512_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512-bf16": (*_AVX512_VNNI, "-mavx512bf16"),
    "avx512-vnni": _AVX512_VNNI,
    "avx2": _AVX2,
}
"""Compiler flags by instruction set, fastest first."""

_HASH_BYTES = hashlib.sha256().digest_size

_COMPILER_TIMEOUT = 300
"""Timeout of the compiler in seconds, per object."""


def object_path(instruction_set: str, directory: Path = BUILD_DIRECTORY) -> Path:
    """Return the path of an instruction set's object, whose name has a hash of the current sources and flags."""
    digest = hashlib.sha256(" ".join((*COMMON_FLAGS, *COMPILER_FLAGS[instruction_set])).encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return directory / f"{instruction_set}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler, or None if there is none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [[name] for name in COMPILERS]
    return next((command for command in candidates if shutil.which(command[0])), None)


def compile_object(compiler: list[str] | None, instruction_set: str, directory: Path = BUILD_DIRECTORY) -> str | None:
    """Compile an instruction set's object unless it is up to date. Return an error in one line, or None on success."""
    if is_built(instruction_set, directory):
        return None
    if compiler is None:
        return "no C++ compiler"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{directory} can't be written: {error.strerror}"
    command = [*compiler, *COMMON_FLAGS, *COMPILER_FLAGS[instruction_set], str(SOURCES / "forward.cpp")]
    return compile_to(object_path(instruction_set, directory), command)


def compile_to(path: Path, command: Sequence[str]) -> str | None:
    """Run a compiler's command, seal its output and move it to `path`. Return an error in one line, or None."""
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
    """Append a hash to a complete object, which the dynamic loader ignores as it follows the last section."""
    path.write_bytes(path.read_bytes() + hashlib.sha256(path.read_bytes()).digest())


def is_whole(path: Path) -> bool:
    """Return whether an object is complete: it ends in the hash of its other bytes."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-_HASH_BYTES]).digest() == content[-_HASH_BYTES:]


def remove_stale(directory: Path = BUILD_DIRECTORY) -> None:
    """Delete objects that were built from other sources or flags."""
    current = {object_path(name, directory) for name in COMPILER_FLAGS}
    for path in directory.glob("[!.]*.so"):
        if path not in current:
            path.unlink(missing_ok=True)


def self_test_error(instruction_set: str, directory: Path = BUILD_DIRECTORY) -> str | None:
    """Test a new object, and delete it if it is wrong. Return why, or None if it passes or can't be tested here."""
    if importlib.util.find_spec("torch") is None:
        return None
    path = object_path(instruction_set, directory)
    # The self-test runs in a process of its own, because a wrong object may crash it.
    command = [sys.executable, "-m", "llama_engine.kernels.cpu.instruction_sets", instruction_set, str(path)]
    try:
        result = subprocess.run(
            command, cwd=SCRIPT.parents[3], capture_output=True, text=True, timeout=_COMPILER_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        reason = f"no result within {_COMPILER_TIMEOUT:g} s"
    else:
        if result.returncode == 0:
            return None
        reason = (result.stderr.splitlines() or [f"exit code {result.returncode}"])[-1]
    # A build beside this one may have deleted it.
    path.unlink(missing_ok=True)
    return f"the self-test fails: {reason}"


def main() -> int:
    """Compile the objects of all instruction sets; return the exit status."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument("--optional", action="store_true", help="exit with 0 even if nothing can be compiled")
    parser.add_argument("--quiet", action="store_true", help="print nothing if nothing is to be compiled")
    options = parser.parse_args()
    # Objects depend on glibc only, so those built from these sources on another machine can be used, too.
    existing = [name for name in COMPILER_FLAGS if is_built(name)]
    compiler = find_compiler()
    if compiler is None and not existing:
        wanted = os.environ.get("CXX") or ", ".join(COMPILERS)
        print(
            f"CPU kernels not built: no C++ compiler ({wanted}); install one (Debian's package g++), or INT8 is slower "
            f"and not batch-invariant",
            file=sys.stderr,
        )
        return 0 if options.optional else 1
    built: list[str] = []
    skipped: dict[str, list[str]] = {}
    for name in COMPILER_FLAGS:
        message = None if name in existing else compile_object(compiler, name) or self_test_error(name)
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
    if not options.quiet or built != existing:
        print(f"CPU kernels: {', '.join(built)} in {BUILD_DIRECTORY}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
