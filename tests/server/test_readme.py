"""The README's commands and programs, unmodified, against a server on the ports that they name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from contract.readme_blocks import ROOT, Block, readme_blocks
from server.forwarding import forwarded
from triton_local.server import LocalTriton

ASKING = [block for block in readme_blocks() if block.asks_a_server]


@pytest.mark.parametrize(
    ("config", "block"),
    [("streaming" if block.streams else "triton", block) for block in ASKING],
    ids=[str(block) for block in ASKING],
)
def test_a_block_of_the_readme_works_as_it_is(config: str, block: Block, request: pytest.FixtureRequest) -> None:
    server: LocalTriton = request.getfixturevalue(config)
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    # As with the virtual environment activated, or its commands on the path.
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
    assert run.stdout.strip(), f"{block.text}\nsaid nothing; stderr: {run.stderr}"
    assert '"error"' not in run.stdout
