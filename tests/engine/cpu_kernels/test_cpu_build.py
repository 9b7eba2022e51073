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


def failing_compiler(folder: Path, message: str) -> str:
    """Write a compiler that prints a message and fails."""
    path = folder / "failing-compiler"
    path.write_text(f'#!/bin/sh\necho "{message}" >&2\nexit 1\n')
    path.chmod(0o755)
    return str(path)


def run_script(folder: Path, cxx: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run build.py on a copy of the sources; -I shows that it needs the standard library alone."""
    for source in (SCRIPT, *SCRIPT.parent.glob("*.h"), *SCRIPT.parent.glob("*.cpp")):
        shutil.copy(source, folder)
    command = [sys.executable, "-I", "-S", str(folder / SCRIPT.name), *arguments]
    return subprocess.run(command, env={**os.environ, "CXX": cxx}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("arguments", "status"), [((), 1), (("--optional",), 0)])
def test_without_a_compiler_the_build_says_so_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    result = run_script(tmp_path, "no-such-compiler", *arguments)
    assert result.returncode == status
    assert result.stderr == (
        "CPU kernels not built: no C++ compiler (no-such-compiler); the model runs on PyTorch's kernels\n"
    )


def test_without_a_compiler_objects_of_the_same_sources_are_kept(tmp_path: Path) -> None:
    """An image without a compiler takes those of the checkout that it is built from."""
    directory = tmp_path / "build"
    directory.mkdir()
    kept, stale = object_path("avx2", directory), directory / "avx2-0123456789abcdef.so"
    for path in (kept, stale):
        path.write_text("here")
        build.seal(path)
    result = run_script(tmp_path, "no-such-compiler")
    assert (result.returncode, result.stdout) == (0, f"CPU kernels: avx2 in {directory}\n")
    assert result.stderr == "CPU kernels for avx512-amx, avx512-vnni skipped: no C++ compiler\n"
    assert list(directory.iterdir()) == [kept]


@pytest.mark.parametrize(("arguments", "status"), [((), 1), (("--optional",), 0)])
def test_a_folder_that_cannot_be_written_is_reported_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    """A file in the folder's place stands for a read-only repository, which root could write."""
    (tmp_path / "build").write_text("in the way")
    result = run_script(tmp_path, sys.executable, *arguments)
    assert (result.returncode, result.stdout) == (status, "")
    assert result.stderr == (
        f"CPU kernels for avx512-amx, avx512-vnni, avx2 skipped: {tmp_path / 'build'} can't be written: File exists\n"
    )


def test_with_nothing_to_compile_a_quiet_build_says_nothing_and_a_plain_one_names_the_objects(tmp_path: Path) -> None:
    directory = tmp_path / "build"
    directory.mkdir()
    for name in build.INSTRUCTION_SETS:
        object_path(name, directory).write_text("here")
        build.seal(object_path(name, directory))
    quiet, plain = (run_script(tmp_path, "no-such-compiler", *options) for options in (["--quiet"], []))
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert (plain.returncode, plain.stdout) == (0, f"CPU kernels: avx512-amx, avx512-vnni, avx2 in {directory}\n")


def test_make_checks_the_objects_whenever_a_target_may_load_them() -> None:
    """A deleted, damaged or stale object is compiled again: no stamp says that all is well."""
    root = SCRIPT.parents[6]
    dry = ["make", "--dry-run", "--old-file=.venv/.ready", "demo"]
    printed = subprocess.run(dry, cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"{SCRIPT.relative_to(root)} --optional --quiet" in printed


@pytest.mark.parametrize(("arguments", "status"), [((), 1), (("--optional",), 0)])
def test_a_compiler_that_knows_no_flag_skips_each_instruction_set_with_a_line(
    tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    result = run_script(tmp_path, failing_compiler(tmp_path, "error: unrecognized option"), *arguments)
    assert (result.returncode, result.stdout) == (status, "")
    names = ", ".join(build.INSTRUCTION_SETS)
    assert result.stderr == f"CPU kernels for {names} skipped: error: unrecognized option\n"
    assert not list(tmp_path.rglob("*.so"))


def test_an_object_that_exists_is_not_compiled_again(tmp_path: Path) -> None:
    path = object_path("avx2", tmp_path)
    path.write_text("here")
    build.seal(path)
    assert compile_object(["no-such-compiler"], "avx2", tmp_path) is None
    assert path.read_bytes().startswith(b"here")


@needs_compiler
def test_a_damaged_object_is_compiled_again(tmp_path: Path) -> None:
    assert compiler is not None
    object_path("avx2", tmp_path).write_text("damaged")
    assert compile_object(compiler, "avx2", tmp_path) is None
    assert build.is_whole(object_path("avx2", tmp_path))


@needs_compiler
def test_two_builds_at_the_same_time_leave_one_whole_object(tmp_path: Path) -> None:
    command = (
        "import sys; from pathlib import Path; from llama_engine.kernels.cpu.build import *;"
        "sys.exit(compile_object(find_compiler(), 'avx2', Path(sys.argv[1])))"
    )
    root = SCRIPT.parents[3]
    builds = [
        subprocess.Popen([sys.executable, "-c", command, tmp_path], env={**os.environ, "PYTHONPATH": str(root)})
        for _ in range(2)
    ]
    assert [build.wait(timeout=120) for build in builds] == [0, 0]
    assert list(tmp_path.iterdir()) == [object_path("avx2", tmp_path)]


def test_the_objects_name_changes_with_sources_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = object_path("avx2")
    monkeypatch.setitem(build.INSTRUCTION_SETS, "avx2", ("-mavx2",))
    flags = object_path("avx2")
    (tmp_path / "other.h").write_text("")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert len({before, flags, object_path("avx2")}) == 3


def test_stale_objects_are_removed_and_others_kept(tmp_path: Path) -> None:
    kept = [object_path("avx2", tmp_path), tmp_path / ".avx2-unfinished.so"]
    for path in (*kept, tmp_path / "avx2-0123456789abcdef.so"):
        path.write_text("")
    build.remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
