"""The image's script runs the health probe."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from deploy.supervisor.tritons import fake_triton

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "docker" / "bin" / "health"


def test_the_images_script_runs_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[2] / "supervisor"))
    with fake_triton() as triton:
        triton.step()
        command = [str(SCRIPT), "--url", str(triton.endpoint)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.startswith("healthy: a step ")
