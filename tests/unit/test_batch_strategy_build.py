"""The batch strategy's build: a whole library of these sources in both models' version folders, or one line why not.

tests/engine/cpu_kernels has the rest of the build, and tests/server what the library does in Triton.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llama_engine.kernels.cpu.build import find_compiler
from llama_engine.triton.batch_strategy.build import NAME, VERSION, is_built

PARTS = ("__init__.py", "kernels/__init__.py", "kernels/cpu", "triton/__init__.py", "triton/batch_strategy")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Copy what the build needs, without libraries."""
    for part in PARTS:
        source, copy = VERSION / "llama_engine" / part, tmp_path / "llama" / "1" / "llama_engine" / part
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build", "__pycache__"))
        else:
            shutil.copy(source, copy)
    (tmp_path / "llama_unary" / "1").mkdir(parents=True)
    return tmp_path


def build(repository: Path, *arguments: str, cxx: str = "") -> subprocess.CompletedProcess[str]:
    """Run the build of a copy, with the standard library alone."""
    environment = {**os.environ, "PYTHONPATH": str(repository / "llama" / "1"), "CXX": cxx}
    command = [sys.executable, "-S", "-m", "llama_engine.triton.batch_strategy.build", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("arguments", "status"), [((), 1), (("--optional",), 0)])
def test_without_a_compiler_each_folder_has_one_line_and_no_stale_library(
    repository: Path, arguments: tuple[str, ...], status: int
) -> None:
    stale = repository / "llama" / "1" / NAME
    stale.write_text("of other sources")
    result = build(repository, *arguments, cxx="no-such-compiler")
    assert (result.returncode, result.stdout, list(repository.rglob(NAME))) == (status, "", [])
    first, second = result.stderr.splitlines()
    assert first == (
        f"batch strategy not built: no C++ compiler; without {stale} a malformed request fails its whole batch"
    )
    assert str(repository / "llama_unary" / "1" / NAME) in second


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_whole_library_is_kept_and_a_truncated_one_is_compiled_again(repository: Path) -> None:
    compiler = " ".join([*(find_compiler() or ()), "-Wall", "-Wextra", "-Werror"])
    assert build(repository, cxx=compiler).returncode == 0
    first, second = sorted(repository.rglob(NAME))
    assert [path.parent.parent.name for path in (first, second)] == ["llama", "llama_unary"]
    assert is_built(first.parent)
    assert first.read_bytes() == second.read_bytes()
    kept = first.stat().st_ino
    assert build(repository, "--quiet", cxx="no-such-compiler").stdout == ""
    second.write_bytes(second.read_bytes()[:-100])
    assert not is_built(second.parent)
    assert build(repository, "--quiet").returncode == 0
    assert second.read_bytes() == first.read_bytes()
    assert first.stat().st_ino == kept
