"""elsewhere.sh: a GPU run on a machine without a package index, with a Python that prints its arguments."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

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


@dataclass(frozen=True)
class Elsewhere:
    """The script in a checkout of its own, with a Python that prints its arguments."""

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


def test_unpacking_replaces_other_versions_and_keeps_the_results(elsewhere: Elsewhere) -> None:
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
def test_kernel_tests_run_once_and_never_end_the_run(
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


def test_a_killed_run_leaves_its_results_to_the_next_one(elsewhere: Elsewhere) -> None:
    kept = elsewhere.checkout / ".work" / "gpu" / "gpu.json"
    kept.write_text("before")
    assert elsewhere.run(RUN='echo half >"$OUT/gpu-0123.json"; kill -KILL $$').returncode == 137
    assert kept.read_text() == "half\n"
    (elsewhere.out / "gpu-0123.json").unlink()
    assert elsewhere.run("--resume", RUN='cat "$OUT/gpu.json"; echo all >"$OUT/gpu.json"; exit 1').returncode == 1
    assert kept.read_text() == "all\n"


def test_a_run_without_archives_passes(elsewhere: Elsewhere) -> None:
    (elsewhere.checkout / ".work" / "gpu").rmdir()
    ran = elsewhere.run(RUN='echo all >"$OUT/gpu.json"')
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_lost_gpu_is_retried_once_with_stock_kernels(elsewhere: Elsewhere) -> None:
    ran = elsewhere.run("--budget", "7", RUN="exit 3")
    assert ran.returncode == 3
    first, second = [line for line in ran.stdout.splitlines() if line.startswith("python3 -m perf.gpu ")]
    assert second == f"{first} --resume --kernels stock --budget 9"
