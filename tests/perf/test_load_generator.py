"""The load generator in its own process, against a server on a socket that behaves as each prompt says."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from perf.environment import ROOT
from perf.load.arrivals import Closed, Poisson
from perf.load.generator import LoadError, drive, generate
from perf.load.protocols import Request, Target

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATH = "/v2/models/llama/generate_stream"


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Target]:
    application = web.Application()
    application.router.add_post(PATH, handler)
    # A handler that never answers must not hold the server's end up.
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Target("test", "triton_stream", f"http://127.0.0.1:{runner.addresses[0][1]}", "llama")
    finally:
        await runner.cleanup()


def chunk(tokens: int, finish: str = "") -> bytes:
    fields = {"text_output": "é", "finish_reason": finish, "num_output_tokens": tokens, "num_input_tokens": 7}
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\r\n\r\n"


async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


async def obey(request: web.Request, prompt: str) -> web.StreamResponse:
    """Do what the prompt says."""
    whole = chunk(1) + chunk(2, "length")
    match prompt:
        case "bytes":
            return await stream(request, *[whole[place : place + 1] for place in range(len(whole))])
        case "two tokens":
            return await stream(request, chunk(1), chunk(1, "length"))
        case "500":
            raise web.HTTPInternalServerError(text="no room")
        case "hang up":
            response = await stream(request, chunk(1))
            assert request.transport is not None
            request.transport.abort()
            return response
        case "hang":
            await stream(request, chunk(1))
            await asyncio.Event().wait()
    return await stream(request, chunk(1), chunk(2, "length"))


async def test_every_request_is_recorded_with_its_fault() -> None:
    prompts = ["warm", "warm too", "fine", "bytes", "two tokens", "500", "hang up", "fine too"]
    # All three users hang until the time is over, so that the last request is never sent.
    prompts += ["hang", "hang", "hang", "late"]
    received: list[str] = []
    running, most = 0, 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        assert "Accept-Encoding" not in request.headers, "compression is not requested"
        received.append((await request.json())["text_input"])
        running += 1
        most = max(most, running)
        try:
            return await obey(request, received[-1])
        finally:
            running -= 1

    async with serving(answer) as target:
        requests = [Request(prompt, 3) for prompt in prompts]
        records = await asyncio.to_thread(drive, target, requests, Closed(3), 2, 3.0)
    assert set(received[:3]) == set(prompts[:3]), "the warm-up comes first"
    assert [record.error for record in records.records[:2]] == ["", ""]
    assert sorted(received) == sorted(prompts[:-1]), "each was sent once"
    assert most == 3
    by_prompt = dict(zip(prompts[2:], records.measured, strict=True))
    for prompt in ("fine", "bytes", "fine too"):
        record = by_prompt[prompt]
        assert (record.error, record.output_tokens, record.prompt_tokens) == ("", 3, 7)
        assert len(record.token_times) == 2
        assert record.sent is not None
        assert record.first_token is not None
        assert record.last_token is not None
        assert 0 <= record.scheduled <= record.sent <= record.first_token <= record.last_token
    assert by_prompt["two tokens"].error == "2 tokens came, not 3"
    assert by_prompt["500"].error == "HTTP 500: no room"
    assert "before its answer was whole" in by_prompt["hang up"].error or "reset" in by_prompt["hang up"].error
    assert by_prompt["hang"].error.startswith("no whole answer when the run's time was over")
    assert len(by_prompt["hang"].token_times) == 1, "what came before the fault is in the record"
    assert (by_prompt["late"].error, by_prompt["late"].sent) == ("not sent: the run's time was over", None)


async def test_measured_requests_do_not_wait_for_the_warm_up() -> None:
    """The warm-up is only answered once a measured request has arrived."""
    measured_there = asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        if (await request.json())["text_input"] == "warm":
            await measured_there.wait()
        else:
            measured_there.set()
        return await stream(request, chunk(1, "length"))

    async with serving(hold) as target:
        requests = [Request(prompt, 1) for prompt in ("warm", "first", "second", "third")]
        records = await asyncio.to_thread(generate, target, requests, Closed(2), 60.0)
    assert [record.error for record in records] == [""] * 4
    ended = [record.ended for record in records]
    for record in records[2:]:
        assert record.scheduled in ended, "a user is free when its previous answer has arrived"


async def test_an_open_loop_sends_without_waiting_for_answers() -> None:
    """No request is answered before the last one has arrived."""
    count, all_there = 12, asyncio.Event()
    prompts: list[str] = []

    async def hold(request: web.Request) -> web.StreamResponse:
        prompts.append((await request.json())["text_input"])
        if len(prompts) == count:
            all_there.set()
        await all_there.wait()
        return await stream(request, chunk(1, "length"))

    arrivals = Poisson(300.0, 5)
    async with serving(hold) as target:
        requests = [Request(str(number), 1) for number in range(count)]
        records = await asyncio.to_thread(generate, target, requests, arrivals, 60.0)
    assert [record.error for record in records] == [""] * count
    assert sorted(prompts, key=int) == [str(number) for number in range(count)], "each was sent once"
    assert [record.scheduled for record in records] == arrivals.moments(count)
    assert all(record.sent is not None and record.sent >= record.scheduled for record in records)


def test_an_unreachable_server_is_recorded() -> None:
    with socket.socket() as held:
        # Bound, so that no other process gets the port, but not listening.
        held.bind(("127.0.0.1", 0))
        target = Target("test", "fastapi", f"http://127.0.0.1:{held.getsockname()[1]}", "llama")
        (refused,) = generate(target, [Request("a", 1)], Closed(8), 30.0)
    assert refused.error == "connection failed: Connection refused"
    assert refused.sent is not None


def test_a_generator_that_dies_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nkill -KILL $$\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr("perf.load.generator.sys.executable", str(interpreter))
    with pytest.raises(LoadError, match=r"^the load generator ended with code -9: nothing on stderr$"):
        drive(Target("test", "fastapi", "http://127.0.0.1:1", "llama"), [Request("a", 1)], Closed(1), 0, 1.0)


BENCHMARK = """
import sys
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.load.protocols import Request, Target
print("imported", flush=True)
drive(Target("test", "fastapi", sys.argv[1], "llama"), [Request("a", 1)], Closed(1), 0, 600.0)
"""


def test_a_benchmark_that_is_killed_leaves_no_generator_behind(tmp_path: Path) -> None:
    """The server never answers; the connection of the one request is open until the generator has ended."""
    program = tmp_path / "benchmark.py"
    program.write_text(BENCHMARK)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        command = [sys.executable, str(program), f"http://127.0.0.1:{server.getsockname()[1]}"]
        environment = {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as benchmark:
            try:
                connection, _ = server.accept()
                with connection:
                    assert connection.recv(4096).startswith(b"POST /generate ")
                    benchmark.kill()
                    output, _ = benchmark.communicate(timeout=60.0)
                    connection.settimeout(60.0)
                    while connection.recv(4096):
                        pass
            finally:
                benchmark.kill()
    assert output == b"imported\n", "the generator doesn't run the benchmark's program again"
