"""A restart in the middle of a soak: requests run when a part is asked to end, and others knock until it is back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import httpx

from perf.soak import clients
from perf.soak.clients import Addresses
from perf.soak.stack import Part, Stack
from perf.soak.tally import Answer, Tally
from perf.soak.users import FAULTS, User
from perf.soak.workload import LONG, prompt

_KNOCK_S = 0.25
_SILENCE_S = 30.0
"""Without an answer, a refusal or a closed connection for so long, a knock has met silence."""
_WITHOUT_A_BYTE = "Server disconnected without sending a response"
"""httpx's words; the same exception reports a response that isn't HTTP."""
_ACCEPTED_AFTER_S = 0.5
"""A request without a first chunk counts as accepted so long after it was sent."""

_STREAMS: dict[Part, tuple[str, ...]] = {"server": ("grpc", "http", "chat", "raw"), "endpoint": ("chat",)}
_UNARY: dict[Part, tuple[str, ...]] = {"server": ("raw", "completion"), "endpoint": ("completion",)}
"""How requests are sent that are to be running when a part is stopped, under a config that streams or doesn't."""


async def ride(user: User, way: str, accepted: Callable[[], None]) -> bool:
    """Send a long request; return whether it was answered completely. accepted: called once the server has it."""
    text, began = prompt(user.randomness), time.perf_counter()
    answer: Answer | None
    try:
        if way in ("raw", "completion"):
            asyncio.get_running_loop().call_later(_ACCEPTED_AFTER_S, accepted)
        if way == "raw":
            answer = await clients.raw(user.at, text, LONG)
        elif way == "completion":
            answer = await clients.openai_completion(user.openai_client(), user.at.served_name, text, LONG)
        elif way == "chat":
            answer = await clients.openai_chat(user.openai_client(), user.at.served_name, text, LONG, came=accepted)
            assert answer is not None
        else:
            async with user.client("grpc" if way == "grpc" else "http").stream(text, LONG) as stream:
                async for _ in stream:
                    accepted()
            answer = stream.completion
    except FAULTS as error:
        user.tally.fail(f"running at a restart, {way}: {type(error).__name__}: {error}")
        return False
    finally:
        accepted()
    user.tally.complete(answer, LONG, time.perf_counter() - began)
    return True


async def knock(at: Addresses, part: Part, tally: Tally, over: asyncio.Event) -> Counter[str]:
    """Send requests while a part ends, is gone and starts, until `over`: each is answered, refused or not connected.

    Returns knocks, how many were sent; turned_away, refused at once or not connected; and closed, connections that the
    server closed without a byte, in the moment when it was ended.
    """
    counts = Counter(knocks=0, turned_away=0, closed=0)
    url, body = f"{at.openai}/completions", {"model": at.served_name, "prompt": "A list", "max_tokens": 2}
    if part == "server":
        url, body = f"http://{at.http}/v2/models/{at.unary}/generate", {"text_input": "A list", "max_tokens": 2}

    async def once(http: httpx.AsyncClient) -> None:
        answered = False
        try:
            # A connection of its own: a kept one may close for idleness while the request is on its way.
            async with http.stream("POST", url, json=body, headers={"Connection": "close"}) as response:
                answered = True
                await response.aread()
        except httpx.TimeoutException:
            tally.fail(f"a request at a restart of the {part} had no answer in {_SILENCE_S:g} s")
        except httpx.ConnectError:
            counts["turned_away"] += 1
        except httpx.HTTPError as error:
            closed = isinstance(error, httpx.NetworkError) or _WITHOUT_A_BYTE in str(error)
            if closed and not answered and part == "server":
                counts["closed"] += 1
            else:
                tally.fail(f"sent at a restart of the {part}: {type(error).__name__}: {error}")
        else:
            counts["turned_away"] += not response.is_success

    async with httpx.AsyncClient(timeout=_SILENCE_S, trust_env=False) as http, asyncio.TaskGroup() as tasks:
        while not over.is_set():
            counts["knocks"] += 1
            tasks.create_task(once(http))
            await asyncio.sleep(_KNOCK_S)
    return counts


async def restart(stack: Stack, part: Part, users: Sequence[User], tally: Tally) -> dict[str, Any]:
    """Stop a part, as by SIGTERM, with a request of every user running, and start it again; return what became of them.

    running: requests that the server had when it was asked to end; answered: of them, completely. The others are those
    of `knock`, from then until the part was back, and of `Stack.stop`. Raises a LauncherError if it doesn't start.
    """
    accepted = [asyncio.Event() for _ in users]
    ways = cycle((_STREAMS if users[0].at.streams else _UNARY)[part])
    rides = [
        asyncio.create_task(ride(user, next(ways), event.set)) for user, event in zip(users, accepted, strict=True)
    ]
    for event in accepted:
        await event.wait()
    running = [ride for ride in rides if not ride.done()]
    over = asyncio.Event()
    knocking = asyncio.create_task(knock(users[0].at, part, tally, over))
    try:
        stopped = await asyncio.to_thread(stack.stop, part)
        answered = sum(await asyncio.gather(*running))
        await asyncio.gather(*rides)
        await asyncio.to_thread(stack.start, part)
    finally:
        over.set()
        counts = await knocking
    return {"part": part, "running": len(running), "answered": answered, **counts, **stopped}
