"""Commands and programs of README.md and docs/, unmodified, against a server on the ports that they name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from contract.code_blocks import ROOT, Block, page_blocks
from server.forwarding import forwarded
from triton_local.server import LocalTriton

# A block that stands on two pages runs once.
CALLING = {block.text: block for block in page_blocks() if block.calls_a_server}.values()


@pytest.mark.parametrize(
    ("config", "block"),
    [("streaming" if block.streams else "triton", block) for block in CALLING],
    ids=[str(block) for block in CALLING],
)
def test_a_code_block_runs_unmodified(config: str, block: Block, request: pytest.FixtureRequest) -> None:
    server: LocalTriton = request.getfixturevalue(config)
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    # As if the virtual environment were activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with forwarded({8000: server.http_url, 8001: server.grpc_url, 8002: server.metrics_url}):
        run = subprocess.run(
            [*command, block.text],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert run.returncode == 0, f"{block.text}\n{run.stdout}\n{run.stderr}"
    assert run.stdout.strip(), f"{block.text}\nno output; stderr: {run.stderr}"
    assert '"error"' not in run.stdout
