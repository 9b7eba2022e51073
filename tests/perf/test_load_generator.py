"""The load generator in its own process, against a server on a socket that behaves as each prompt says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from perf.load.generator import drive, generate
from perf.load.protocols import Request, Target


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Target, list[str]]]:
    """Yield a server that does what each prompt says, and the prompts that it has received."""
    received: list[str] = []
    measured_there = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert "Accept-Encoding" not in request.headers, "compression is not requested"
        received.append((await request.json())["text_input"])
        if received[-1] == "wait for measured":
            await measured_there.wait()
        elif received[-1] == "measured":
            measured_there.set()
        return await obey(request, received[-1])

    application = web.Application()
    application.router.add_post("/v2/models/llama/generate_stream", answer)
    # A handler that never answers must not hold the server's end up.
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Target("test", "triton_stream", f"http://127.0.0.1:{runner.addresses[0][1]}", "llama"), received
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
    async with serving() as (target, received):
        requests = [Request(prompt, 3) for prompt in prompts]
        records = await asyncio.to_thread(drive, target, requests, 3, 2, 3.0)
    assert set(received[:3]) == set(prompts[:3]), "the warm-up comes first"
    assert [record.error for record in records.records[:2]] == ["", ""]
    assert sorted(received) == sorted(prompts[:-1]), "each was sent once"
    sent = [(record.sent, record.ended) for record in records.records if record.sent is not None]
    assert max(sum(begin <= now < end for begin, end in sent) for now, _ in sent) == 3, "as many at a time as users"
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
    assert by_prompt["hang up"].error.startswith("connection failed: ")
    assert by_prompt["hang"].error.startswith("no whole answer when the run's time was over")
    assert len(by_prompt["hang"].token_times) == 1, "what came before the fault is in the record"
    assert (by_prompt["late"].error, by_prompt["late"].sent) == ("not sent: the run's time was over", None)


async def test_measured_requests_do_not_wait_for_the_warm_up() -> None:
    """The warm-up is only answered once a measured request has arrived."""
    async with serving() as (target, _):
        requests = [Request(prompt, 3) for prompt in ("wait for measured", "warm", "measured", "another")]
        records = await asyncio.to_thread(generate, target, requests, 2, 60.0)
    assert [record.error for record in records] == [""] * 4
    ended = [record.ended for record in records]
    for record in records[2:]:
        assert record.scheduled in ended, "a user is free when its previous answer has arrived"


async def test_requests_after_the_last_second_are_no_part_of_the_run() -> None:
    """Two measured ones are, however late."""
    async with serving() as (target, received):
        requests = [Request(str(number), 3) for number in range(9)]
        run = await asyncio.to_thread(drive, target, requests, 2, 2, 60.0, 0.0)
    assert [record.error for record in run.records] == [""] * 4
    assert sorted(received) == ["0", "1", "2", "3"]


async def test_requests_arrive_at_their_moments_whatever_is_unanswered() -> None:
    # The first is only answered once the second has arrived.
    requests, arrivals = [Request("wait for measured", 3), Request("measured", 3)], [0.1, 0.3]
    async with serving() as (target, _):
        first, second = await asyncio.to_thread(generate, target, requests, 2, 60.0, arrivals=arrivals)
    assert [first.error, second.error] == ["", ""]
    assert [first.scheduled, second.scheduled] == arrivals
    assert second.sent is not None
    assert first.ended > second.sent >= 0.3


async def test_a_turn_has_the_chat_before_it_in_its_prompt() -> None:
    async with serving() as (target, received):
        chats = [Request(" a", 3), Request(" b", 3, 2), Request(" c", 3, 3), Request(" d", 3), Request(" e", 3, 2)]
        records = await asyncio.to_thread(generate, target, chats, 2, 60.0)
    assert [record.error for record in records] == [""] * 5
    assert sorted(received) == [" a", " aéé b", " aéé béé c", " d", " déé e"]
    assert [record.turn for record in records] == [1, 2, 3, 1, 2]


async def test_turns_after_a_failed_one_are_not_sent() -> None:
    async with serving() as (target, _):
        chats = [Request("500", 3), Request("b", 3, 2), Request("c", 3, 3), Request("fine", 3)]
        records = await asyncio.to_thread(generate, target, chats, 1, 60.0)
    failed = "not sent: the turn before it failed"
    assert [record.error for record in records] == ["HTTP 500: no room", failed, failed, ""]
