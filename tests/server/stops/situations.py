"""The situations that a stop may find a server in. Each sends its requests and returns once the server has them.

None waits for a response: what was sent still runs, or waits, when the stop comes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from server.stops.connections import SMALL_BUFFER, Connection, Stream, connection, grpc_streams, http_request
from server.stops.outcomes import End, Outcome, end_of_bytes
from server.stops.scene import ANSWERED, PROMPT, TOKENS, CellError, Scene

SLOTS = 32
"""Of both configs."""
FEW = 8
"""Requests beside those that a situation is about."""
CONNECTIONS = 4
LONG_PROMPTS = 128
"""Two or three seconds of prefill on two cores."""

_RAW = "over a connection: "
"""Such requests leave the sampling to the checkpoint, so their text is another one than a client's."""
_LONG = "Return a list of the words in the string, in the order of their first appearance. " * 20
"""About 400 tokens."""
_FEW_TOKENS = 12
_LEAKING_S = 60.0
_LEAK = """
import os, queue, sys
import tritonclient.grpc as triton
came = queue.Queue()
client = triton.InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: came.put(error))
asked = triton.InferInput("no_such_input", [1], "INT32")
asked.set_data_from_numpy(__import__("numpy").array([1], dtype="int32"))
client.async_stream_infer("llama", [asked])
assert "no_such_input" in str(came.get(timeout=30))
os._exit(0)
"""

Enter = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Situation:
    """enter: sends the requests. running, waiting: how many must run and wait at the stop."""

    enter: Enter
    running: int = 0
    waiting: int = 0


async def _idle(scene: Scene) -> None:
    """Nothing runs; a request has shown that it serves."""
    (request,) = scene.ask(1, tokens=_FEW_TOKENS)
    outcome, detail = await request.task
    if outcome is not Outcome.COMPLETE:
        raise CellError(f"the server doesn't serve: {detail}")


async def _full(scene: Scene, count: int = SLOTS) -> None:
    scene.ask(count)


async def _prefill(scene: Scene, count: int = LONG_PROMPTS) -> None:
    """Each begins differently."""
    scene.ask(count, lambda number: f"{number} {_LONG}", tokens=_FEW_TOKENS)


async def _read(scene: Scene) -> None:
    """Half over HTTP and half over gRPC, whose streams stay open for further requests."""
    for sse in await _ask(scene, SLOTS // 2):
        scene.add("HTTP stream", _ended(scene, sse))
    for stream in await _ask_over_grpc(scene, SLOTS // 2):
        scene.add("open gRPC stream", stream.read(scene.expected, PROMPT, TOKENS))


async def _unread(scene: Scene) -> None:
    """Nothing is read before the server is gone."""
    permitted = (*ANSWERED, Outcome.CUT)
    silent = (Outcome.SILENT,) if scene.network_ends else ()
    for sse in await _ask(scene, CONNECTIONS, SMALL_BUFFER):
        scene.add("unread HTTP stream", _read_after(scene.stopped, scene, sse), (*permitted, *silent))
    for stream in await _ask_over_grpc(scene, CONNECTIONS):
        scene.add("unread gRPC stream", _read_stream_later(scene, stream), permitted)


async def _half_closed(scene: Scene) -> None:
    """Closed for sending after the request. Over HTTP, to Triton, such a client has left."""
    for sse in await _ask(scene, CONNECTIONS):
        sse.close_sending()
        scene.add("half-closed HTTP stream", _ended(scene, sse), (*ANSWERED, Outcome.CUT))
    for stream in await _ask_over_grpc(scene, SLOTS // 2):
        await stream.close_sending()
        scene.add("half-closed gRPC stream", stream.read(scene.expected, PROMPT, TOKENS))


async def _leak(scene: Scene) -> None:
    """A process has a request refused by Triton itself on a gRPC stream, and exits without closing the stream."""
    leaking = await asyncio.create_subprocess_exec(sys.executable, "-c", _LEAK, scene.addresses.grpc)
    if await asyncio.wait_for(leaking.wait(), _LEAKING_S) != 0:
        raise CellError("the stream wasn't leaked")


async def _keep_alive(scene: Scene) -> None:
    """Connections and streams without a request."""
    for _ in range(CONNECTIONS):
        idle = await scene.closing.enter_async_context(connection(scene.addresses.http))
        await idle.send(b"GET /v2/health/live HTTP/1.1\r\nHost: triton\r\nConnection: keep-alive\r\n\r\n")
        if b" 200 " not in await idle.read(enough=b"\r\n\r\n"):
            raise CellError("the server isn't live")
    await scene.closing.enter_async_context(grpc_streams(scene.addresses.grpc, CONNECTIONS))


async def _half_a_body(scene: Scene) -> None:
    """Of one request by its length, and of one in chunks; neither is accepted."""
    head, body = http_request("generate", PROMPT, TOKENS)
    half = len(body) // 2
    chunked = head.replace(f"Content-Length: {len(body)}".encode(), b"Transfer-Encoding: chunked")
    for data in (head + body[:half], chunked + f"{len(body):x}\r\n".encode() + body[:half]):
        for _ in range(CONNECTIONS // 2):
            half_sent = await scene.closing.enter_async_context(connection(scene.addresses.http))
            await half_sent.send(data)


def _beside_few(enter: Enter) -> Enter:
    async def both(scene: Scene) -> None:
        await enter(scene)
        scene.ask(FEW)

    return both


async def _cancelling(scene: Scene) -> None:
    """One half of the requests is cancelled when the stop begins."""
    scene.ask(SLOTS // 2)
    for request in scene.ask(SLOTS // 2, permitted=(*ANSWERED, Outcome.CANCELLED)):
        scene.at_stop.append(request.task.cancel)


async def _everything(scene: Scene) -> None:
    for enter in (_keep_alive, _half_a_body, _leak, _half_closed, _unread, _read):
        await enter(scene)
    scene.ask(3 * FEW)
    await _prefill(scene, 2 * SLOTS)
    # The clients are slower than the model, so some of these have ended before the last of them is accepted.
    await scene.wait_until_accepted()
    await _cancelling(scene)
    await _send_at_once(scene, 3 * SLOTS)


async def _leaked_and_half_sent(scene: Scene) -> None:
    """Without a client that reads a gRPC stream, for which a stop waits: for `make test`."""
    for enter in (_half_a_body, _leak):
        await enter(scene)
    await _send_at_once(scene, FEW)


async def _and_unread(scene: Scene) -> None:
    await _unread(scene)
    await _leaked_and_half_sent(scene)


async def _send_at_once(scene: Scene, count: int) -> None:
    """Over connections of their own, which are read from the stop on: what is read before delays what is sent."""
    read = asyncio.Event()
    scene.at_stop.append(read.set)
    for sse in await _ask(scene, count):
        scene.add("HTTP stream, read from the stop on", _read_after(read, scene, sse))


SITUATIONS = {
    "idle": Situation(_idle),
    "running": Situation(_full, running=SLOTS),
    "queued": Situation(partial(_full, count=3 * SLOTS), running=SLOTS, waiting=SLOTS),
    "prefill": Situation(_prefill, running=1, waiting=SLOTS // 2),
    "read": Situation(_read, running=SLOTS),
    "unread": Situation(_unread),
    "half-closed": Situation(_half_closed, running=1),
    "leaked": Situation(_beside_few(_leak), running=1),
    "keep-alive": Situation(_beside_few(_keep_alive), running=1),
    "half-body": Situation(_beside_few(_half_a_body), running=1),
    "cancelling": Situation(_cancelling, running=SLOTS),
    "everything": Situation(_everything, running=SLOTS, waiting=1),
}
"""By the key in a result's file; perf/report/stops.py has the table's titles."""

LEAKED = Situation(_leaked_and_half_sent, running=1)
LEAKED_AND_UNREAD = Situation(_and_unread, running=1)


async def _ask(scene: Scene, count: int, buffer: int | None = None) -> list[Connection]:
    """Ask over HTTP connections of their own; return them, unread."""

    async def asked() -> Connection:
        sse = await scene.closing.enter_async_context(connection(scene.addresses.http, buffer))
        await sse.send(b"".join(http_request("generate_stream", PROMPT, TOKENS, chunks=scene.streams)))
        return sse

    return await asyncio.gather(*(asked() for _ in range(count)))


async def _ask_over_grpc(scene: Scene, count: int) -> list[Stream]:
    """Ask over gRPC streams on one connection of their own; return them, unread."""
    streams = await scene.closing.enter_async_context(grpc_streams(scene.addresses.grpc, count))
    for stream in streams:
        await stream.ask(PROMPT, TOKENS, scene.streams)
    return streams


async def _ended(scene: Scene, sse: Connection) -> End:
    return end_of_bytes(await sse.read(), scene.expected, _RAW + PROMPT, TOKENS)


async def _read_after(event: asyncio.Event, scene: Scene, sse: Connection) -> End:
    await event.wait()
    return await _ended(scene, sse)


async def _read_stream_later(scene: Scene, stream: Stream) -> End:
    await scene.stopped.wait()
    end = await stream.read(scene.expected, PROMPT, TOKENS)
    # The call ends with a status; what had arrived before is gone with the connection.
    return (Outcome.CUT, end[1]) if end[0] is Outcome.LOST and stream.closed else end
