"""The supervisor, the guard and the probe run on the standard library alone, and where nothing else is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / folder) for folder in ("client", "deploy/supervisor", "deploy/local")]


@pytest.mark.parametrize("module", ["triton_supervisor.cli", "triton_local.guard", "triton_llama.health"])
def test_a_package_is_needed_where_there_is_none(module: str) -> None:
    program = f"import sys; sys.path += {PATHS}; import {module}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    foreign = {name.partition(".")[0] for name in run.stdout.split()} - set(sys.stdlib_module_names)
    assert foreign <= {"triton_supervisor", "triton_local", "triton_llama", "__main__"}
