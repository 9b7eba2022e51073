"""Commands and programs of README.md and docs/, unmodified, against a server on the ports that they name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from deploy.code_blocks import ROOT, Block, page_blocks
from end_to_end.openai_endpoint import in_front_of
from triton_local.server import LocalTriton

DEFAULT = "SmolLM2-135M-Instruct"
"""The pages say the default checkpoint's name; the tests' checkpoint answers to it."""

# A block that stands on two pages runs once.
CALLING = {block.text: block for block in page_blocks() if block.calls_a_server}.values()


@pytest.mark.parametrize(
    ("server", "block"),
    [("streaming", block) for block in CALLING],
    indirect=["server"],
    ids=[str(block) for block in CALLING],
)
async def test_a_code_block_runs_unmodified(server: LocalTriton, block: Block) -> None:
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    # As if the virtual environment were activated.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ports = {8000: server.http_url, 8001: server.grpc_url, 8002: server.metrics_url}
    async with contextlib.AsyncExitStack() as stack:
        if "localhost:9000" in block.text:
            ports[9000] = f"127.0.0.1:{stack.enter_context(in_front_of(server, served_name=DEFAULT)).port}"
        await stack.enter_async_context(_forwarded(ports))
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
