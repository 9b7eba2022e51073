"""What a soak counts of the requests that it sends while a part of the server is away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
from unit.peers import HOST, hang_up, respond, server, stay_silent

from perf.soak import restarting
from perf.soak.clients import Addresses
from perf.soak.restarting import Knocks
from perf.soak.stack import Part
from perf.soak.tally import Tally


def _response(status: str) -> Callable[[socket.socket], None]:
    return respond(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())


async def _knocked(port: int, part: Part, tally: Tally) -> Knocks:
    """Return the knocks once one or more have ended."""
    address = f"{HOST}:{port}"
    knocks = Knocks(Addresses(address, address, f"http://{address}/v1", "model", "llama", streams=False), part, tally)
    knocking = asyncio.create_task(knocks.keep_knocking())
    await asyncio.sleep(0)
    knocks.end()
    await knocking
    return knocks


@pytest.mark.parametrize("part", ["server", "endpoint"])
@pytest.mark.parametrize(
    ("behave", "turned_away"),
    [(_response("200 OK"), False), (_response("503 Service Unavailable"), True)],
    ids=["answered", "refused"],
)
async def test_a_knock_is_answered_or_turned_away(
    behave: Callable[[socket.socket], None], turned_away: bool, part: Part
) -> None:
    tally = Tally()
    with server(behave) as port:
        knocks = await _knocked(port, part, tally)
    assert (knocks.sent, knocks.turned_away) == (1, int(turned_away))
    assert not tally.errors


@pytest.mark.parametrize(("part", "closed"), [("server", 1), ("endpoint", 0)])
async def test_a_knock_that_gets_no_byte_is_counted_for_triton_and_an_error_of_the_endpoint(
    part: Part, closed: int
) -> None:
    tally = Tally()
    with server(hang_up) as port:
        knocks = await _knocked(port, part, tally)
    assert (knocks.turned_away, knocks.closed) == (0, closed)
    assert len(tally.errors) == 1 - closed


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\nthe beginning",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\nthe beg",
        b"garbage\r\n\r\n",
    ],
    ids=["cut body", "cut chunk", "no HTTP"],
)
async def test_a_response_that_has_begun_and_is_cut_off_is_an_error_of_the_soak(answer: bytes) -> None:
    tally = Tally()
    with server(respond(answer)) as port:
        knocks = await _knocked(port, "server", tally)
    assert (knocks.turned_away, knocks.closed) == (0, 0)
    assert len(tally.errors) == 1


async def test_a_knock_on_a_closed_port_is_turned_away() -> None:
    tally = Tally()
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    assert (await _knocked(port, "server", tally)).turned_away == 1
    assert not tally.errors


async def test_a_knock_that_meets_silence_is_an_error_of_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting, "_SILENCE_S", 0.2)
    tally = Tally()
    with server(stay_silent) as port:
        knocks = await _knocked(port, "server", tally)
    assert knocks.turned_away == 0
    assert list(tally.errors) == ["a request at a restart of the server had no answer in 0.2 s"]
