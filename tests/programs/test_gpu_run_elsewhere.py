"""elsewhere.sh: a GPU run on a machine without a package index, with a Python that prints its arguments."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from perf.environment import ROOT
from perf.gpu import pack

SCRIPT = Path("perf/gpu/elsewhere.sh")

PYTHON = """#!/bin/sh
case "$*" in
  "-c import sysconfig"*) echo "$SITE" ;;
  "-c import "*) echo "${IMPORTS-pytest xdist}" | grep -qw "${2#import }" ;;
  "-m pytest"*) echo "python3 $*"; echo "9 passed"; eval "${PYTEST:-}" ;;
  *) echo "python3 $*"; echo "path $PYTHONPATH"; eval "${RUN:-}" ;;
esac
"""


class Elsewhere:
    """The script in a checkout of its own, with a Python that prints its arguments."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.site, self.out, self.path = (folder / name for name in ("checkout", "site", "out", "bin"))
        self.packed = self.checkout / ".work" / "gpu"
        for made in ((self.checkout / SCRIPT).parent, self.packed, self.site, self.out, self.path):
            made.mkdir(parents=True)
        (self.checkout / SCRIPT).write_bytes((ROOT / SCRIPT).read_bytes())
        (self.path / "python3").write_text(PYTHON)
        (self.path / "python3").chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> tuple[int, list[str]]:
        """Run the script; return its exit code and its lines."""
        paths = {"PATH": f"{self.path}:{os.environ['PATH']}", "OUT": str(self.out), "SITE": str(self.site)}
        ran = subprocess.run(
            ["bash", SCRIPT, *arguments],
            cwd=self.checkout,
            env={**paths, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode or not ran.stderr, ran.stderr
        return ran.returncode, ran.stdout.splitlines()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path)


def test_unpacking_replaces_other_versions_with_one_cuda_library_and_keeps_the_results(elsewhere: Elsewhere) -> None:
    site, out = elsewhere.site, elsewhere.out
    for old in ("bitsandbytes", "bitsandbytes-0.1.dist-info", "bitsandbytes_more-0.1.dist-info"):
        (site / old).mkdir()
    (site / "bitsandbytes" / "old.py").write_text("")
    pack.pack_site(elsewhere.packed / "site.tar.gz", ["bitsandbytes"], "130")
    (elsewhere.packed / "gpu.json").write_text("before")
    code, lines = elsewhere.run("--budget", "8", "--resume")
    assert code == 0
    assert lines[-2] == f"python3 -m perf.gpu --output {out}/gpu.json --partial {out} --budget 8 --resume"
    assert f"{elsewhere.checkout}/.:{elsewhere.checkout}/tests" in lines[-1]
    packed = {entry.name for entry in (site / "bitsandbytes").iterdir()}
    assert "__init__.py" in packed
    assert packed.isdisjoint({"old.py", "__pycache__"})
    libraries = {name for name in packed if name.startswith("libbitsandbytes")}
    assert libraries == {"libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"}
    assert sorted(entry.name for entry in site.glob("*.dist-info")) == [
        f"bitsandbytes-{version('bitsandbytes')}.dist-info",
        "bitsandbytes_more-0.1.dist-info",
    ]
    assert (out / "gpu.json").read_text() == "before"


@pytest.mark.parametrize(
    ("tested", "said", "times"),
    [
        ({"PYTEST": "exit 1"}, "tests/kernels: NOT PASSED (exit code 1), see kernels.log: 9 passed", 1),
        ({"IMPORTS": "xdist"}, "tests/kernels: not run, this Python has no pytest", 2),
    ],
    ids=["wrong", "no pytest"],
)
def test_kernel_tests_run_once_and_never_end_the_run(
    tested: dict[str, str], said: str, times: int, elsewhere: Elsewhere
) -> None:
    (first, lines), (second, more) = (elsewhere.run(**tested) for _ in range(2))
    assert first == second == 0
    assert [line for line in [*lines, *more] if line.startswith("tests/kernels")] == [said] * times
    assert sum(line.startswith("python3 -m perf.gpu ") for line in [*lines, *more]) == 2
    if times == 1:
        # In parallel where pytest can.
        asked = (elsewhere.out / "kernels.log").read_text().splitlines()[0]
        assert asked == "python3 -m pytest -q -W default -n 8 tests/kernels"


def test_a_killed_run_leaves_its_results_to_the_next_one(elsewhere: Elsewhere) -> None:
    kept = elsewhere.packed / "gpu.json"
    kept.write_text("before")
    assert elsewhere.run(RUN='echo half >"$OUT/gpu-0123.json"; kill -KILL $$')[0] == 137
    assert kept.read_text() == "half\n"
    (elsewhere.out / "gpu-0123.json").unlink()
    assert elsewhere.run("--resume", RUN='cat "$OUT/gpu.json"; echo all >"$OUT/gpu.json"; exit 1')[0] == 1
    assert kept.read_text() == "all\n"


def test_a_lost_gpu_is_retried_once_with_stock_kernels_also_without_archives(elsewhere: Elsewhere) -> None:
    elsewhere.packed.rmdir()
    code, lines = elsewhere.run("--budget", "7", RUN="exit 3")
    assert code == 3
    first, second = [line for line in lines if line.startswith("python3 -m perf.gpu ")]
    assert second == f"{first} --resume --kernels stock --budget 9"
