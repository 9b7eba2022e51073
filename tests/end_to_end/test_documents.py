"""Commands and programs of README.md and docs/, unmodified, against a server on the ports that they name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
from deploy.code_blocks import ROOT, Block, page_blocks
from end_to_end.openai_endpoint import in_front_of
from frontend.endpoints import Endpoint
from triton_local.server import LocalTriton

DEFAULT = "SmolLM2-135M-Instruct"
"""The pages say the default checkpoint's name; the tests' checkpoint answers to it."""


@pytest.fixture(scope="module")
def named_as_default(streaming: LocalTriton) -> Iterator[Endpoint]:
    """The OpenAI endpoint under the name that the pages say."""
    with in_front_of(streaming, served_name=DEFAULT) as endpoint:
        yield endpoint


# A block that stands on two pages runs once.
CALLING = {block.text: block for block in page_blocks() if block.calls_a_server}.values()


# make test runs the README's.
@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=str(block), marks=[pytest.mark.long] * (block.page != "README")) for block in CALLING],
)
async def test_a_code_block_runs_unmodified(streaming: LocalTriton, named_as_default: Endpoint, block: Block) -> None:
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    # As if the virtual environment were activated.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ports = {8000: streaming.http_address, 8001: streaming.grpc_address, 8002: streaming.metrics_address}
    async with _forwarded({**ports, 9000: f"127.0.0.1:{named_as_default.port}"}):
        run = await asyncio.create_subprocess_exec(
            *(*command, block.text),
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await asyncio.wait_for(run.communicate(), 240)
    output_text = f"{block.text}\n{output.decode()}\n{errors.decode()}"
    assert run.returncode == 0, output_text
    assert output.strip(), output_text
    assert b'"error"' not in output


@contextlib.asynccontextmanager
async def _forwarded(ports: Mapping[int, str]) -> AsyncIterator[None]:
    """Forward these ports of this machine, byte by byte, inside the block. ports: port → host:port of the server.

    Raises OSError where a port is in use.
    """
    async with contextlib.AsyncExitStack() as listening:
        for port, address in ports.items():
            await listening.enter_async_context(await _forwarder(port, address))
        yield


async def _forwarder(port: int, address: str) -> asyncio.Server:
    host, its_port = address.split(":")

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(its_port))
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))

    return await asyncio.start_server(connect, "127.0.0.1", port, backlog=128)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    # After one side has gone, the other one sees the end of the stream.
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    with contextlib.suppress(OSError):
        sink.close()
        await sink.wait_closed()
