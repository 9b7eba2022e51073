"""Commands and programs of README.md and docs/, unmodified, against a server on the ports that they name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.code_blocks import ROOT, Block, page_blocks
from end_to_end.servers import new_server
from triton_local.openai_endpoint import OpenAIEndpoint

DEFAULT = "SmolLM2-135M-Instruct"
"""The pages say the default checkpoint's name; the tests' checkpoint answers to it."""


@pytest.fixture(scope="module")
def default_ports() -> Iterator[None]:
    """A server and its OpenAI endpoint on their default ports."""
    ports: dict[str, int] = {"http": 8000, "grpc": 8001, "metrics": 8002}
    with (
        new_server("streaming", {"LLAMA_POOLING": "mean"}, ports=ports) as server,
        OpenAIEndpoint("127.0.0.1", 9000, grace=5) as endpoint,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TRITON_LLAMA_OPENAI_SERVED_NAME", DEFAULT)
        endpoint.start(server.grpc_address)
        yield


# A block that stands on two pages runs once.
CALLING = {block.text: block for block in page_blocks() if block.calls_a_server}.values()


# make test runs the README's.
@pytest.mark.usefixtures("default_ports")
@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=str(block), marks=[pytest.mark.long] * (block.page != "README")) for block in CALLING],
)
def test_a_code_block_runs_unmodified(block: Block) -> None:
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    # As if the virtual environment were activated.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        [*command, block.text], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=240
    )
    output_text = f"{block.text}\n{done.stdout.decode()}\n{done.stderr.decode()}"
    assert done.returncode == 0, output_text
    assert done.stdout.strip(), output_text
    assert b'"error"' not in done.stdout
