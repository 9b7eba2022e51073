"""What travels to a machine without a package index, and what its script does with it there."""

from __future__ import annotations

import os
import subprocess
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from perf import environment
from perf.environment import ROOT
from perf.gpu import pack

SCRIPT = ROOT / "perf" / "gpu" / "elsewhere.sh"

PYTHON = """#!/bin/sh
case "$*" in
  "-c import sysconfig"*) echo "$SITE" ;;
  "-c import "*) echo "${IMPORTS-pytest xdist}" | grep -qw "${2#import }" ;;
  "-m pytest"*) echo "python3 $*"; echo "9 passed"; eval "${PYTEST:-}" ;;
  *) echo "python3 $*"; echo "path $PYTHONPATH"; eval "${RUN:-}" ;;
esac
"""


def test_another_cuda_s_library_travels_or_none_does(tmp_path: Path) -> None:
    pack.pack_site(tmp_path / "site.tar.gz", ["bitsandbytes"], "130")
    with tarfile.open(tmp_path / "site.tar.gz") as tar:
        names = tar.getnames()
    libraries = {Path(name).name for name in names if Path(name).name.startswith("libbitsandbytes")}
    assert libraries == {"libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"}
    assert "bitsandbytes/__init__.py" in names
    assert any(name.endswith(".dist-info/METADATA") for name in names)
    assert not any("__pycache__" in name for name in names)


def test_a_package_of_this_python_is_taken_to_another() -> None:
    with pytest.raises(ValueError, match=r"numpy .* was built for this Python; it can't be taken to another one"):
        list(pack.files_of("numpy"))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("pytriton/tritonserver/bin/tritonserver", True),
        ("pytriton/tritonserver/python_backend_stubs/3.12/triton_python_backend_stub", True),
        ("pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub", False),
        ("nvidia_pytriton.libs/libtritonserver-717102f0.so", True),
        ("nvidia_pytriton.libs/libpython3-419a3a08.13.so.1.0", False),
        ("nvidia_pytriton-0.7.0.dist-info/METADATA", True),
        ("pytriton/triton.py", False),
    ],
)
def test_the_server_lacks_a_file_or_has_one_too_many(name: str, needed: bool) -> None:
    assert pack.is_of_the_server(name, "3.12") is needed


def test_a_copy_does_not_say_what_it_is_a_copy_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.sources()["commit"] == "unknown"
    carried = tmp_path / environment.CARRIED
    carried.parent.mkdir(parents=True)
    carried.write_text('{"commit": "45dd544", "uncommitted_changes": false, "changes_sha256": null}')
    assert environment.sources()["commit"] == "45dd544"


@pytest.mark.parametrize("git", ["none", "one that can't read it"])
def test_a_repository_that_git_cannot_read_ends_the_run_before_anything_is_measured(
    git: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    # As a worktree has it, whose repository has stayed behind.
    (tmp_path / ".git").write_text("gitdir: /nowhere/.git/worktrees/copy\n")
    if git == "none":
        monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.sources()["commit"] == "unknown"
    carried = tmp_path / environment.CARRIED
    carried.parent.mkdir(parents=True)
    carried.write_text('{"commit": "45dd544", "uncommitted_changes": false, "changes_sha256": null}')
    assert environment.describe()["commit"] == "45dd544"


@dataclass(frozen=True)
class Elsewhere:
    """The script in a checkout of its own, with a Python that says what it is asked for."""

    checkout: Path
    site: Path
    out: Path
    path: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = {"PATH": f"{self.path}:{os.environ['PATH']}", "OUT": str(self.out), "SITE": str(self.site)}
        return subprocess.run(
            ["bash", f"perf/gpu/{SCRIPT.name}", *arguments],
            cwd=self.checkout,
            env={**paths, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    made = Elsewhere(*(tmp_path / name for name in ("checkout", "site", "out", "bin")))
    for folder in (made.checkout / "perf" / "gpu", made.checkout / ".work" / "gpu", made.site, made.out, made.path):
        folder.mkdir(parents=True)
    (made.checkout / "perf" / "gpu" / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    (made.path / "python3").write_text(PYTHON)
    (made.path / "python3").chmod(0o755)
    return made


def test_two_versions_lie_in_one_folder_or_the_results_elsewhere(elsewhere: Elsewhere) -> None:
    site, out = elsewhere.site, elsewhere.out
    (site / "bitsandbytes").mkdir()
    (site / "bitsandbytes" / "old.py").write_text("")
    (site / "bitsandbytes-0.1.dist-info").mkdir()
    (site / "bitsandbytes_more-0.1.dist-info").mkdir()
    pack.pack_site(elsewhere.checkout / ".work" / "gpu" / "site.tar.gz", ["bitsandbytes"], "130")
    (elsewhere.checkout / ".work" / "gpu" / "gpu.json").write_text("before")
    ran = elsewhere.run("--budget", "8", "--resume")
    assert ran.returncode == 0, ran.stderr
    asked, path = ran.stdout.splitlines()[-2:]
    assert asked == f"python3 -m perf.gpu --output {out}/gpu.json --partial {out} --budget 8 --resume"
    assert f"{elsewhere.checkout}/.:{elsewhere.checkout}/tests" in path
    assert (site / "bitsandbytes" / "__init__.py").exists()
    assert not (site / "bitsandbytes" / "old.py").exists()
    assert sorted(entry.name for entry in site.glob("*.dist-info")) == [
        f"bitsandbytes-{version('bitsandbytes')}.dist-info",
        "bitsandbytes_more-0.1.dist-info",
    ]
    assert (out / "gpu.json").read_text() == "before"


@pytest.mark.parametrize(
    ("tested", "said", "times"),
    [
        ({}, "tests/kernels: passed: 9 passed", 1),
        ({"PYTEST": "exit 1"}, "tests/kernels: NOT PASSED (exit code 1), see kernels.log: 9 passed", 1),
        ({"PYTEST": "exit 124"}, "tests/kernels: NOT DONE in 120 s, see kernels.log: 9 passed", 1),
        ({"IMPORTS": "xdist"}, "tests/kernels: not run, this Python has no pytest", 2),
    ],
    ids=["right", "wrong", "too long", "no pytest"],
)
def test_kernels_that_are_not_tested_or_wrong_end_the_run_or_are_tested_twice(
    tested: dict[str, str], said: str, times: int, elsewhere: Elsewhere
) -> None:
    ran = [elsewhere.run(**tested) for _ in range(2)]
    assert [one.returncode for one in ran] == [0, 0], ran[0].stderr
    lines = [line for one in ran for line in one.stdout.splitlines()]
    assert [line for line in lines if line.startswith("tests/kernels")] == [said] * times
    assert sum(line.startswith("python3 -m perf.gpu ") for line in lines) == 2
    if times == 1:
        # In parallel where pytest can.
        asked = (elsewhere.out / "kernels.log").read_text().splitlines()[0]
        assert asked == "python3 -m pytest -q -W default -n 8 tests/kernels"


def test_a_run_that_dies_is_lost_to_the_next_one(elsewhere: Elsewhere) -> None:
    kept = elsewhere.checkout / ".work" / "gpu" / "gpu.json"
    kept.write_text("before")
    assert elsewhere.run(RUN='echo half >"$OUT/gpu-0123.json"; kill -KILL $$').returncode == 137
    assert kept.read_text() == "half\n"
    (elsewhere.out / "gpu-0123.json").unlink()
    assert elsewhere.run("--resume", RUN='cat "$OUT/gpu.json"; echo all >"$OUT/gpu.json"; exit 1').returncode == 1
    assert kept.read_text() == "all\n"


def test_a_good_run_fails_where_nothing_was_carried(elsewhere: Elsewhere) -> None:
    (elsewhere.checkout / ".work" / "gpu").rmdir()
    ran = elsewhere.run(RUN='echo all >"$OUT/gpu.json"')
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_gpu_that_was_lost_ends_the_run_or_is_tried_for_ever(elsewhere: Elsewhere) -> None:
    ran = elsewhere.run("--budget", "7", RUN="exit 3")
    assert ran.returncode == 3
    first, second = [line for line in ran.stdout.splitlines() if line.startswith("python3 -m perf.gpu ")]
    assert second == f"{first} --resume --kernels stock --budget 9"
