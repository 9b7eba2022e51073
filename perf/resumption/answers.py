"""`drive`: a closed loop of users, and each answer in a form that two runs of one request can be compared in.

Left out is what a run determines and not the request: ids, the time, how many tokens of the prompt were cached, and how
a stream's text is cut into events.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from perf.resumption.mix import Request

ANSWER_S = 300.0
"""Seconds until a request without a whole answer counts as an error."""

_OF_THE_RUN = ("id", "created", "prompt_tokens_details")
_JOINED = ("text", "content", "reasoning_content", "reasoning", "arguments")
"""Strings whose deltas follow each other; others replace what came before."""


@dataclass(frozen=True)
class Answer:
    """An answer. number: of its request, counted on where a load goes round.

    content: canonical JSON, of a stream all its events' in one. error: one line; "" for none. tokens: of all its
    choices. pause: the longest time in seconds without a byte of it.
    """

    number: int
    content: str
    error: str
    tokens: int
    pause: float


def drive(url: str, requests: Sequence[Request], users: int, goes_on: Callable[[], bool]) -> list[Answer]:
    """Send each request once, `users` at a time, and more from the beginning while `goes_on`; return the answers."""
    return asyncio.run(_drive(url, requests, users, goes_on))


async def _drive(url: str, requests: Sequence[Request], users: int, goes_on: Callable[[], bool]) -> list[Answer]:
    numbers = itertools.takewhile(lambda number: number < len(requests) or goes_on(), itertools.count())
    answers: list[Answer] = []

    async def user(client: aiohttp.ClientSession) -> None:
        for number in numbers:
            answers.append(await _ask(client, url, number, requests[number % len(requests)]))

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client, asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user(client))
    return sorted(answers, key=lambda answer: answer.number)


async def _ask(client: aiohttp.ClientSession, url: str, number: int, request: Request) -> Answer:
    chunks: list[bytes] = []
    last, pause = time.monotonic(), 0.0
    try:
        async with client.post(url + request.path, json=dict(request.body)) as response:
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                now = time.monotonic()
                last, pause = now, max(pause, now - last)
        whole = read_answer(b"".join(chunks), response.status, request.streamed)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Answer(number, "", f"{request.path}: {type(error).__name__}: {error}"[:300], 0, pause)
    return Answer(number, json.dumps(whole, sort_keys=True), "", int(whole["usage"]["completion_tokens"]), pause)


def read_answer(body: bytes, status: int, streamed: bool) -> dict[str, Any]:
    """Return an answer without what its run determines. Raises ValueError for an error and an incomplete answer."""
    text = body.decode(errors="replace")
    if status != 200:
        raise ValueError(f"status {status}: {text}")
    if not streamed:
        return _object(text)
    *events, done, rest = text.split("\n\n")
    if (done, rest) != ("data: [DONE]", ""):
        raise ValueError(f"the stream ended early: {(done + rest)[-200:]}")
    whole: dict[str, Any] = {}
    for event in events:
        _add(whole, _object(event.removeprefix("data: ")))
    return whole


def _object(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(
        text, object_pairs_hook=lambda pairs: {name: value for name, value in pairs if name not in _OF_THE_RUN}
    )
    if "error" in fields:
        raise ValueError(str(fields["error"]))
    return fields


def _add(whole: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            _add(whole[name], value)
        elif isinstance(value, list):
            whole[name] = whole.get(name) or []
            _extend(whole[name], value)
        elif name in _JOINED and value is not None:
            whole[name] = (whole.get(name) or "") + value
        elif value is not None or name not in whole:
            whole[name] = value


def _extend(items: list[Any], more: Sequence[Any]) -> None:
    """Add to a list: choices and calls, which have an index, to the one with the same index."""
    for item in more:
        if not (isinstance(item, dict) and "index" in item):
            items.append(item)
            continue
        same = [known for known in items if known["index"] == item["index"]]
        if not same:
            same = [{}]
            items += same
        _add(same[0], item)
        items.sort(key=lambda known: int(known["index"]))
