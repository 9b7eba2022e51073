"""Exactness under random traffic: a text depends neither on the batch nor on clients that leave before the end.

In FP32, with few slots and small prefills, so that sequences wait, join others, and are prefilled in chunks. Greedy
answers equal those of generate() for the prompt alone, seeded ones those of the server for the request alone.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from engine.engines import load
from notes import Note
from server.clients import WIRES, Answer, ask, generate
from server.metrics import Metrics
from server.random_requests import Greedy, seeded_request
from server.servers import facts, is_decoupled
from server.streams import STREAM_WIRES, Call, GrpcStream, Sse, whole
from triton_local.server import LocalTriton

CLIENTS = 20
LEAVING = 0.15
"""Share of the clients that leave before the end."""

MOST_CHUNKS_BEFORE_LEAVING = 6


@dataclass(frozen=True)
class _Job:
    """A request, seconds before it is sent, and the chunks after which its client leaves.

    seeded: index of the seeded request that it repeats; None if it is greedy.
    """

    request: Mapping[str, object]
    seeded: int | None
    pause: float
    leaves_after: int | None

    def run(self, server: LocalTriton, number: int) -> Answer | None:
        """Send over one of the endpoints; return None if the client left."""
        time.sleep(self.pause)
        streams = is_decoupled(server)
        if self.leaves_after is not None:
            self._leave(server, streams, self.leaves_after)
            return None
        if streams and number % 4 < 3:
            return whole(server, STREAM_WIRES[number % 4], self.request)
        return ask(server, generate if streams else WIRES[number % 4], **self.request)

    def _leave(self, server: LocalTriton, streams: bool, after: int) -> None:
        if not streams:
            with Call(server, self.request) as call:
                # No sign of progress to wait for: some requests are queued then, others run.
                time.sleep(after / 4)
                call.cancel()
        elif after % 2:
            with GrpcStream(server) as stream:
                stream.ask({**self.request, "stream": True})
                for _ in range(after):
                    if stream.next().final:
                        break
                stream.cancel()
        else:
            with Sse(server, self.request) as events:
                for _ in zip(range(after), events.events(), strict=False):
                    pass


@pytest.fixture(scope="module")
def greedy() -> Greedy:
    return Greedy.of(load("none", dtype="float32"), 32, random.Random(500))


@pytest.fixture(scope="module")
def seeded(greedy: Greedy) -> list[dict[str, object]]:
    draw = random.Random(50)
    return [seeded_request(draw, greedy.prompts) for _ in range(40)]


def _jobs(count: int, draw: random.Random, greedy: Greedy, seeded: list[dict[str, object]]) -> list[_Job]:
    jobs = []
    for _ in range(count):
        index = draw.randrange(len(seeded)) if draw.random() < 0.5 else None
        request = greedy.request(draw) if index is None else seeded[index]
        leaves_after = draw.randint(0, MOST_CHUNKS_BEFORE_LEAVING) if draw.random() < LEAVING else None
        if leaves_after is not None:
            # Long enough to still run when its client leaves.
            request = {**request, "max_tokens": 150, "min_tokens": 150}
        jobs.append(_Job(request, index, draw.uniform(0, 0.1), leaves_after))
    return jobs


@pytest.mark.parametrize(
    ("config", "requests"),
    [
        ("fp32", 40),
        pytest.param("fp32", 250, marks=pytest.mark.long),
        pytest.param("fp32_streaming", 250, marks=pytest.mark.long),
    ],
)
def test_texts_do_not_depend_on_the_traffic(
    config: str,
    requests: int,
    greedy: Greedy,
    seeded: list[dict[str, object]],
    note: Note,
    request: pytest.FixtureRequest,
) -> None:
    server: LocalTriton = request.getfixturevalue(config)
    assert "linear layers 43 in float32" in facts(server)
    torch.set_num_threads(1)
    jobs = _jobs(requests, random.Random(501 + (config == "fp32_streaming")), greedy, seeded)
    alone = {job.seeded: ask(server, generate, **seeded[job.seeded]) for job in jobs if job.seeded is not None}
    metrics = Metrics(server)
    with ThreadPoolExecutor(CLIENTS) as pool:
        runs = [pool.submit(partial(job.run, server, number)) for number, job in enumerate(jobs)]
    ties_before, counted = greedy.ties, Counter[str]()
    for job, run in zip(jobs, runs, strict=True):
        answer = run.result()
        if answer is None:
            counted["left"] += 1
        elif job.seeded is None:
            greedy.check(job.request, answer)
            counted["greedy"] += 1
        else:
            assert answer == alone[job.seeded], job.request
            counted["seeded"] += 1
    metrics.wait(Metrics.idle, "all slots are free")
    cancelled = metrics.grown("llama_cancellations_total")
    ties = greedy.ties - ties_before
    note(
        f"traffic in FP32, {config}: {counted['greedy']} greedy, {counted['seeded']} seeded, {counted['left']} clients "
        f"left, {cancelled:.0f} of them were cancelled in time; {ties} ties"
    )
    assert counted["greedy"] + counted["seeded"] > 0.7 * requests
    assert ties <= 1
    assert 1 <= cancelled <= counted["left"]
    assert metrics.grown("llama_step_errors_total") == 0
