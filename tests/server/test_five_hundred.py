"""Exactness under traffic: random requests that come when they like, some of which leave before their end.

In FP32, with few slots and small prefills, so that rows wait, enter beside others and are read in chunks. Who stays
gets what generate() says to the prompt alone (greedy), or what the server says to it alone (seeded).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from engine.engines import load
from llama_engine.model.loader import Checkpoint
from notes import Note
from server.clients import WIRES, Answer, ask, generate
from server.expectations import Greedy, seeded_request
from server.fleet import Fleet
from server.metrics import Metrics
from server.servers import facts, is_decoupled
from server.streams import STREAM_WIRES, Call, GrpcStream, Sse
from triton_local.server import LocalTriton

REQUESTS = 250
"""Under each of the two configs."""

CLIENTS = 20
LEAVING = 0.15
MOST_PIECES_BEFORE_LEAVING = 6


@dataclass(frozen=True)
class _Job:
    """A request, how long its client thinks before it sends it, and after how many pieces it leaves, if it does."""

    request: Mapping[str, object]
    greedy: bool
    pause: float
    leaves_after: int | None


@pytest.fixture(scope="module")
def greedy() -> Greedy:
    checkpoint: Checkpoint = load("none", dtype="float32")
    return Greedy.of(checkpoint, 32, random.Random(500))


@pytest.fixture
def fp32_streaming(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("fp32_streaming") as server:
        assert "linear layers 43 in float32" in facts(server)
        yield server


@pytest.fixture(scope="module")
def seeded(greedy: Greedy) -> list[dict[str, object]]:
    randomness = random.Random(50)
    return [seeded_request(randomness, greedy.prompts) for _ in range(40)]


def _run(server: LocalTriton, streams: bool, number: int, job: _Job) -> Answer | None:
    """Ask in one of all ways; None if the client left."""
    time.sleep(job.pause)
    if job.leaves_after is not None:
        _leave(server, streams, job)
        return None
    if not streams:
        return ask(server, WIRES[number % len(WIRES)], **job.request)
    if number % 4 == 3:
        return ask(server, generate, **job.request)
    return STREAM_WIRES[number % 4](server, job.request).whole


def _leave(server: LocalTriton, streams: bool, job: _Job) -> None:
    assert job.leaves_after is not None
    if not streams:
        with Call(server, job.request) as call:
            # Nothing shows how far it is: some still wait in Triton's queue, others run.
            time.sleep(job.leaves_after / 4)
            call.cancel()
    elif job.leaves_after % 2:
        with GrpcStream(server) as stream:
            stream.ask({**job.request, "stream": True})
            for _ in range(job.leaves_after):
                if stream.next().final:
                    break
            stream.cancel()
    else:
        with Sse(server, job.request) as events:
            for _ in zip(range(job.leaves_after), events.events(), strict=False):
                pass


@pytest.mark.parametrize("config", ["fp32", "fp32_streaming"])
def test_a_text_depends_on_the_traffic(
    config: str, greedy: Greedy, seeded: list[dict[str, object]], note: Note, request: pytest.FixtureRequest
) -> None:
    server: LocalTriton = request.getfixturevalue(config)
    torch.set_num_threads(1)
    streams = is_decoupled(server)
    alone = [ask(server, generate, **one) for one in seeded]
    randomness = random.Random(501 + streams)
    jobs: list[_Job] = []
    draws: list[int | None] = []
    for _ in range(REQUESTS):
        draw = randomness.randrange(len(seeded)) if randomness.random() < 0.5 else None
        asked = greedy.request(randomness) if draw is None else seeded[draw]
        leaves = randomness.randint(0, MOST_PIECES_BEFORE_LEAVING) if randomness.random() < LEAVING else None
        if leaves is not None:
            # Long enough not to be through before its client is gone.
            asked = {**asked, "max_tokens": 150, "min_tokens": 150}
        jobs.append(_Job(asked, draw is None, randomness.uniform(0, 0.1), leaves))
        draws.append(draw)
    metrics = Metrics(server)
    with ThreadPoolExecutor(CLIENTS) as pool:
        numbered = [partial(_run, server, streams, number, job) for number, job in enumerate(jobs)]
        answers = list(pool.map(lambda run: run(), numbered))
    ties_before, counted = greedy.ties, Counter[str]()
    for job, draw, answer in zip(jobs, draws, answers, strict=True):
        if answer is None:
            counted["left"] += 1
        elif draw is None:
            greedy.check(job.request, answer)
            counted["greedy"] += 1
        else:
            assert answer == alone[draw], job.request
            counted["seeded"] += 1
    metrics.wait(Metrics.idle, "all slots are given back")
    cancelled = metrics.grown("llama_cancellations_total")
    ties = greedy.ties - ties_before
    note(
        f"traffic in FP32, {'streamed' if streams else 'one response'}: {counted['greedy']} greedy, "
        f"{counted['seeded']} seeded, {counted['left']} clients left, {cancelled:.0f} of them noticed; {ties} ties"
    )
    assert counted["greedy"] + counted["seeded"] > 0.7 * REQUESTS
    assert ties <= 1
    assert 1 <= cancelled <= counted["left"]
    assert metrics.grown("llama_step_errors_total") == 0
