"""The health probe as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.tritons import DEAD, FakeTriton, fake_triton, refusal

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "docker" / "bin" / "health"
MODULE = (sys.executable, "-W", "error", "-m", "triton_supervisor.health")


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as one:
        yield one


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)


def test_the_probe_answers_by_its_exit_code_in_one_line(triton: FakeTriton) -> None:
    command = (*MODULE, "--url", str(triton.endpoint))
    triton.step(ago=95)
    yes = _run(*command, "--step-age", "1000")
    assert (yes.returncode, yes.stderr) == (0, "")
    assert yes.stdout.startswith("healthy: a step ")
    triton.generate = lambda _: refusal(*DEAD)
    no = _run(*command)
    assert (no.returncode, no.stderr, len(no.stdout.splitlines())) == (1, "", 1)
    assert no.stdout.startswith("unhealthy: HTTP 400: ")


def test_wrong_usage_is_one_line_and_code_2(triton: FakeTriton) -> None:
    wrong = _run(*MODULE, "--timeout", "0")
    assert (wrong.returncode, wrong.stdout, len(wrong.stderr.splitlines())) == (2, "", 1)


def test_the_images_script_runs_the_probe(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[2] / "supervisor"))
    triton.step()
    assert _run(str(SCRIPT), "--url", str(triton.endpoint)).returncode == 0
