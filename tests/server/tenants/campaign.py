"""Two tenants whose requests interleave over every way into one server."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator

from server.tenants.asked import TENANTS, Asked
from server.tenants.canaries import Found, Phrases, canary, foreign
from server.tenants.endpoint_requests import WAY, endpoint_request
from server.tenants.engine_requests import TARGETS, engine_request
from server.tenants.said import Said, said
from server.tenants.sending import Heard, Tenant, send

AT_ONCE = 40
"""More than the server's 32 slots, so that some wait."""

LOOK_S = 0.5
"""Between two looks at what shows the requests that run."""

KEYS = [canary(900_000 + tenant, "key") for tenant in range(TENANTS)]
"""The tenants' keys of the endpoint: canaries that no request has."""


class Campaign:
    """Requests and what came back. leaks: canaries of others, or secrets, by the request in whose response they are.

    own: kinds of canaries that responses to their own requests have. wrong: responses that don't say what their
    requests demand.
    """

    def __init__(self, seed: int, faults: bool) -> None:
        """faults: whether some fail in the middle of a step (faulty_model.py)."""
        self._seed = seed
        self._faults = faults
        self._draw = random.Random(seed)
        self.phrases = Phrases(self._draw)
        self.outcomes = Counter[str]()
        self.asked: list[Asked] = []
        self.heard: dict[int, Said] = {}
        self.own: set[str] = set()
        self.leaks: list[tuple[Asked, list[Found]]] = []
        self.wrong: list[tuple[Asked, str]] = []

    async def run(self, tenants: list[Tenant], count: int, look: Callable[[], None]) -> None:
        """Send requests, AT_ONCE at a time, and look at their surroundings meanwhile."""
        requests = self._requests(count)

        async def work() -> None:
            for asked in requests:
                self._take(asked, await send(tenants[asked.tenant], asked))

        async def watch() -> None:
            while len(self.asked) < count:
                await asyncio.to_thread(look)
                await asyncio.sleep(LOOK_S)

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            for _ in range(AT_ONCE):
                group.create_task(work())

    async def repeat(self, tenants: list[Tenant], most: int) -> int:
        """Send a sample again, each request alone; return how many. Another response than before is a finding."""
        can = [asked for asked in self.asked if not asked.leaves]
        sample = random.Random(self._seed).sample(can, min(most, len(can)))
        for asked in sample:
            alone = said(await send(tenants[asked.tenant], asked)).comparable()
            if alone != self.heard[asked.number].comparable():
                self.wrong.append((asked, f"{self.heard[asked.number].comparable()} beside others, {alone} alone"))
        return len(sample)

    @property
    def refused(self) -> int:
        """How many requests got an error."""
        return sum(bool(one.error) for one in self.heard.values())

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the tokens of prompt and text by the request's id, as the clients of completed requests were told."""
        known = {}
        for asked in self.asked:
            values = self.heard[asked.number].values
            if usage := values.get(-1, {}).get("usage"):
                count = usage["prompt_tokens"], usage["completion_tokens"]
            else:
                told = [one for one in values.values() if "num_input_tokens" in one]
                count = told[0]["num_input_tokens"] if told else 0, sum(one["num_output_tokens"] for one in told)
            its_own = asked.id == canary(asked.number, "id")
            if its_own and not (asked.leaves or self.heard[asked.number].error) and any(count):
                known[asked.id] = count
        return known

    def _requests(self, count: int) -> Iterator[Asked]:
        """Draw requests; of each kind of way every tenant has as many."""
        ways = [way for way in (*TARGETS, *[WAY] * 3) for _ in range(TENANTS)]
        for number in range(count):
            way = ways[number % len(ways)]
            if way == WAY:
                yield endpoint_request(number, self.phrases, self._draw)
            else:
                yield engine_request(number, way, self.phrases, self._draw, self._faults)

    def _take(self, asked: Asked, heard: Heard) -> None:
        read = said(heard)
        self.asked.append(asked)
        self.heard[asked.number] = read
        self.outcomes[f"{asked.way} {heard.status}"] += 1
        data = bytes(heard.raw) + b"\n" + read.everything()
        found = self.phrases.found_in(data)
        self.own |= {kind for number, kind in found if number == asked.number}
        if leaked := foreign(found, asked.number):
            self.leaks.append((asked, leaked))
        if not asked.leaves and (problem := _problem(asked, read)):
            self.wrong.append((asked, problem))


def _problem(asked: Asked, read: Said) -> str:
    """Return what a response lacks, or has of another's; empty if nothing."""
    if read.error:
        # What is known of a request's response is known because it must succeed.
        known = asked.says or asked.tokens is not None
        return f"refused: {read.error}" if known else ""
    texts = {index: text for index, text in read.texts.items() if asked.says not in text}
    if texts:
        return f"{texts} without {asked.says!r}"
    for values in read.values.values():
        usage = values.get("usage") or {}
        prompt = values.get("num_input_tokens", usage.get("prompt_tokens"))
        tokens = values.get("num_output_tokens", usage.get("completion_tokens"))
        for count, its_own in ((prompt, asked.prompt_tokens), (tokens, asked.tokens)):
            if its_own is not None and count is not None and count != its_own:
                return f"{count} tokens counted, {its_own} are its own"
        if values.get("num_cached_tokens") and "n" not in asked.body:
            return f"{values['num_cached_tokens']} tokens of its prompt were in a cache"
    return ""
