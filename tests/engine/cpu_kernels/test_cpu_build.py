"""The CPU kernels' build: one object per instruction set, whole or not at all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llama_engine.kernels.cpu import build
from llama_engine.kernels.cpu.build import SCRIPT, compile_object, find_compiler, object_path

compiler = find_compiler()
needs_compiler = pytest.mark.skipif(compiler is None, reason="no C++ compiler")
OPTIONAL = pytest.mark.parametrize(("arguments", "status"), [((), 1), (("--optional",), 0)])
EVERY = "avx512-amx, avx512-vnni, avx2"


def start_script(folder: Path, cxx: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a copy of build.py in a folder; -I shows that it needs the standard library alone."""
    shutil.copy(SCRIPT, folder)
    command = [sys.executable, "-I", "-S", str(folder / SCRIPT.name), *arguments]
    return subprocess.Popen(
        command, env={**os.environ, "CXX": cxx}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_script(folder: Path, cxx: str, *arguments: str) -> tuple[int, str, str]:
    """Run it; return its status and what it prints to stdout and stderr."""
    script = start_script(folder, cxx, *arguments)
    stdout, stderr = script.communicate(timeout=60)
    return script.returncode, stdout, stderr


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a source that compiles at once, in place of the kernels'."""
    (tmp_path / "forward.cpp").write_text('extern "C" int forward() { return 0; }')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    return tmp_path


def seal_stub(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("here")
    build.seal(path)
    return path


@OPTIONAL
def test_without_a_compiler_the_build_says_so_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    missing = "CPU kernels not built: no C++ compiler (no-such-compiler); the model runs on PyTorch's kernels\n"
    assert run_script(tmp_path, "no-such-compiler", *arguments) == (status, "", missing)


@OPTIONAL
def test_a_folder_that_cannot_be_written_is_reported_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    """A file in the folder's place stands for a read-only repository, which root could write."""
    (tmp_path / "build").write_text("in the way")
    skipped = f"CPU kernels for {EVERY} skipped: {tmp_path / 'build'} can't be written: File exists\n"
    assert run_script(tmp_path, sys.executable, *arguments) == (status, "", skipped)


@OPTIONAL
def test_an_instruction_set_that_the_compiler_lacks_is_skipped_with_a_line(
    tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    failing = tmp_path / "failing-compiler"
    failing.write_text('#!/bin/sh\necho "error: unrecognized option" >&2\nexit 1\n')
    failing.chmod(0o755)
    skipped = f"CPU kernels for {EVERY} skipped: error: unrecognized option\n"
    assert run_script(tmp_path, str(failing), *arguments) == (status, "", skipped)
    assert not list(tmp_path.rglob("*.so"))


def test_objects_of_other_sources_are_removed(sources: Path) -> None:
    """An image without a compiler takes those of the checkout that it is built from."""
    directory = sources / "build"
    current = seal_stub(object_path("avx2", directory))
    seal_stub(directory / "avx2-0123456789abcdef.so")
    unfinished = seal_stub(directory / ".avx2-unfinished.so")
    skipped = "CPU kernels for avx512-amx, avx512-vnni skipped: no C++ compiler\n"
    assert run_script(sources, "no-such-compiler") == (0, f"CPU kernels: avx2 in {directory}\n", skipped)
    assert sorted(directory.iterdir()) == sorted([current, unfinished])
    assert current.read_bytes().startswith(b"here")
    # With nothing to compile a quiet build says nothing.
    for name in build.INSTRUCTION_SETS:
        seal_stub(object_path(name, directory))
    assert run_script(sources, "no-such-compiler", "--quiet") == (0, "", "")
    assert run_script(sources, "no-such-compiler") == (0, f"CPU kernels: {EVERY} in {directory}\n", "")


def test_make_checks_the_objects_whenever_a_target_may_load_them() -> None:
    """A deleted, damaged or stale object is compiled again: no stamp says that all is well."""
    root = SCRIPT.parents[6]
    dry = ["make", "--dry-run", "--old-file=.venv/.ready", "demo"]
    printed = subprocess.run(dry, cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"{SCRIPT.relative_to(root)} --optional --quiet" in printed


@needs_compiler
def test_a_damaged_object_is_compiled_again(sources: Path) -> None:
    object_path("avx2", sources).write_text("damaged")
    assert compile_object(compiler, "avx2", sources) is None
    assert build.is_whole(object_path("avx2", sources))


@needs_compiler
def test_two_builds_at_the_same_time_leave_whole_objects(sources: Path) -> None:
    assert compiler is not None
    builds = [start_script(sources, " ".join(compiler)) for _ in range(2)]
    assert [script.communicate(timeout=120)[1] for script in builds] == ["", ""]
    objects = sorted(object_path(name, sources / "build") for name in build.INSTRUCTION_SETS)
    assert sorted((sources / "build").iterdir()) == objects
    assert all(map(build.is_whole, objects))


def test_the_objects_name_changes_with_sources_and_flags(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = object_path("avx2")
    monkeypatch.setitem(build.INSTRUCTION_SETS, "avx2", ("-mavx2",))
    flags = object_path("avx2")
    (sources / "other.h").write_text("")
    assert len({before, flags, object_path("avx2")}) == 3
