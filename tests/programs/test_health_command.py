"""The health probe as a process: a script without site-packages, a module, and a command of `triton-llama`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.tritons import DEAD, FakeTriton, fake_triton, refusal

SCRIPT = Path(__file__).resolve().parents[2] / "client" / "triton_llama" / "health.py"
PROGRAMS = {
    "script": (sys.executable, "-I", "-S", "-W", "error", str(SCRIPT)),
    "module": (sys.executable, "-W", "error", "-m", "triton_llama.health"),
    "command": (sys.executable, "-W", "error", "-c", "from triton_llama.cli import main; main()", "health"),
}


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as one:
        yield one


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_way_to_start_the_probe_is_the_same_program(triton: FakeTriton, program: str) -> None:
    command = (*PROGRAMS[program], "--url", str(triton.endpoint))
    triton.step(ago=95)
    yes = _run(*command, "--step-age", "1000", "--ready")
    assert (yes.returncode, yes.stderr) == (0, "")
    assert yes.stdout.startswith("ready: a step ")
    triton.generate = lambda _: refusal(*DEAD)
    no = _run(*command)
    assert (no.returncode, no.stderr, len(no.stdout.splitlines())) == (1, "", 1)
    assert no.stdout.startswith("unhealthy: HTTP 400: ")
    wrong = _run(*command, "--live", "--ready")
    assert (wrong.returncode, wrong.stdout, len(wrong.stderr.splitlines())) == (2, "", 1)
    assert "--step-age SECONDS" in _run(*command, "-h").stdout


def test_the_file_is_the_images_executable_and_imports_the_standard_library_only() -> None:
    assert SCRIPT.read_text().startswith("#!/usr/bin/env -S python3 -I -S\n")
    program = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); print(*sys.modules)"
    modules = _run(sys.executable, "-I", "-S", "-W", "error", "-c", program).stdout.split()
    assert "http.client" in modules
    assert {name.split(".")[0] for name in modules} <= set(sys.stdlib_module_names) | {"__main__"}
