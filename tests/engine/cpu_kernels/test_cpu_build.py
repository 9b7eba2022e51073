"""The CPU kernels' build: one object per instruction set, whole or not at all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llama_engine.kernels.cpu import build
from llama_engine.kernels.cpu.build import COMPILER_FLAGS, SCRIPT, compile_object, find_compiler, object_path
from llama_engine.kernels.cpu.instruction_sets import allowed_instruction_sets

compiler = find_compiler()
needs_compiler = pytest.mark.skipif(compiler is None, reason="no C++ compiler")
EVERY = ", ".join(COMPILER_FLAGS)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a source that compiles at once, in place of the kernels'."""
    (tmp_path / "forward.cpp").write_text('extern "C" int forward() { return 0; }')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    return tmp_path


MISSING = (
    "CPU kernels not built: no C++ compiler (no-such-compiler); install one (Debian's package g++), or INT8 is "
    "slower and not batch-invariant\n"
)


@pytest.mark.parametrize(
    ("compiler", "writable", "line", "arguments", "status"),
    [
        ("no-such-compiler", True, MISSING, ["--optional"], 0),
        ("{}/failing", True, f"CPU kernels for {EVERY} skipped: error: unrecognized option\n", [], 1),
        ("{}/failing", False, f"CPU kernels for {EVERY} skipped: {{}}/build can't be written: File exists\n", [], 1),
    ],
)
def test_what_cannot_be_built_is_reported_in_one_line(
    tmp_path: Path, compiler: str, writable: bool, line: str, arguments: list[str], status: int
) -> None:
    (tmp_path / "failing").write_text('#!/bin/sh\necho "error: unrecognized option" >&2\nexit 1\n')
    (tmp_path / "failing").chmod(0o755)
    if not writable:
        # A file in the folder's place stands for a read-only repository, which root could write.
        (tmp_path / "build").write_text("in the way")
    shutil.copy(SCRIPT, tmp_path)
    # -I shows that the script needs the standard library alone.
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(tmp_path / SCRIPT.name), *arguments],
        env={**os.environ, "CXX": compiler.format(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (status, "", line.format(tmp_path))
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_a_damaged_object_is_compiled_again(sources: Path) -> None:
    object_path("avx2", sources).write_text("damaged")
    assert compile_object(compiler, "avx2", sources) is None
    assert build.is_whole(object_path("avx2", sources))


@needs_compiler
@pytest.mark.skipif("avx2" not in allowed_instruction_sets(), reason="this CPU has no AVX2")
def test_a_new_object_that_fails_the_self_test_is_deleted(sources: Path) -> None:
    assert compile_object(compiler, "avx2", sources) is None
    message = build.self_test_error("avx2", sources)
    assert message is not None
    assert message.startswith("the self-test fails: AttributeError: ")
    assert not object_path("avx2", sources).exists()


def test_the_objects_name_changes_with_sources_and_flags(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = object_path("avx2")
    monkeypatch.setitem(build.COMPILER_FLAGS, "avx2", ("-mavx2",))
    flags = object_path("avx2")
    (sources / "other.h").write_text("")
    assert len({before, flags, object_path("avx2")}) == 3
