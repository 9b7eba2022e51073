"""The supervisor's command line: refusals, announcements, and the standard library alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
UNWRITABLE = "TRITON_STATE_FILE is /nowhere/state: nothing can be announced: No such file or directory"
PATHS = [str(ROOT / folder) for folder in ("deploy/supervisor",)]


@pytest.mark.parametrize("module", ["triton_supervisor.cli", "triton_supervisor.health"])
def test_only_the_standard_library_is_imported(module: str) -> None:
    program = f"import sys; sys.path += {PATHS}; import {module}; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    foreign = {name.partition(".")[0] for name in run.stdout.split()} - set(sys.stdlib_module_names)
    assert foreign <= {"triton_supervisor", "__main__"}


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "triton_supervisor", *arguments]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (["announce"], {}, "TRITON_STATE_FILE is not set; it must be the server's, which looks beside it"),
        (["announce"], {"TRITON_STATE_FILE": "/nowhere/state"}, UNWRITABLE),
        (["announce", "--seconds", "-1"], {}, "--seconds is -1; it must be 0 ... 3600"),
        ([], {"TRITON_GRACE_SECONDS": "x"}, "TRITON_GRACE_SECONDS is 'x'; it must be a whole number, 1 ... 3600"),
    ],
)
def test_a_refusal_is_one_line_and_code_2(arguments: list[str], environment: dict[str, str], line: str) -> None:
    run = _run(*arguments, **environment)
    assert (run.returncode, run.stderr) == (2, f"triton_supervisor: {line}\n")


def test_an_announcement_is_a_file_beside_the_state_file(tmp_path: Path) -> None:
    assert _run("announce", "--seconds", "0", TRITON_STATE_FILE=str(tmp_path / "state.json")).returncode == 0
    assert (tmp_path / "state.json.announced").exists()
