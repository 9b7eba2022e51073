"""What a soak counts of the requests that it sends while a part of the server is away."""

from __future__ import annotations

import asyncio
import socket

import pytest
from unit.peers import HOST, hang_up, respond, server, stay_silent

from perf.soak import restarting
from perf.soak.clients import Addresses
from perf.soak.restarting import knock
from perf.soak.stack import Part
from perf.soak.tally import Tally


async def _knocked(port: int, part: Part, tally: Tally) -> tuple[int, ...]:
    """Return how many knocks were sent, turned away and closed, once one has ended."""
    address, over = f"{HOST}:{port}", asyncio.Event()
    at = Addresses(address, address, f"http://{address}/v1", "model", "llama", streams=False)
    knocking = asyncio.create_task(knock(at, part, tally, over))
    await asyncio.sleep(0)
    over.set()
    return tuple((await knocking).values())


@pytest.mark.parametrize(
    ("part", "answer", "turned_away", "closed", "errors"),
    [
        ("server", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 0, 0, 0),
        ("endpoint", b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", 1, 0, 0),
        ("server", None, 0, 1, 0),
        ("endpoint", None, 0, 0, 1),
        ("server", b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\nthe beginning", 0, 0, 1),
        ("server", b"garbage\r\n\r\n", 0, 0, 1),
    ],
    ids=["answered", "refused", "closed by Triton", "closed by the endpoint", "cut body", "no HTTP"],
)
async def test_a_knock_is_answered_turned_away_closed_by_triton_or_an_error(
    part: Part, answer: bytes | None, turned_away: int, closed: int, errors: int
) -> None:
    tally = Tally()
    with server(hang_up if answer is None else respond(answer)) as port:
        knocks = await _knocked(port, part, tally)
    assert (*knocks, len(tally.errors)) == (1, turned_away, closed, errors)


async def test_a_knock_on_a_closed_port_is_turned_away() -> None:
    tally = Tally()
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    assert await _knocked(port, "server", tally) == (1, 1, 0)
    assert not tally.errors


async def test_a_knock_that_meets_silence_is_an_error_of_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting, "_SILENCE_S", 0.2)
    tally = Tally()
    with server(stay_silent) as port:
        assert await _knocked(port, "server", tally) == (1, 0, 0)
    assert list(tally.errors) == ["a request at a restart of the server had no answer in 0.2 s"]
