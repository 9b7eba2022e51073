"""The article's two servers with the embedded checkpoint, and a measurement of one started as in a benchmark."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
import torch
from fastapi import FastAPI
from unit.made_up_results import result

from perf.baselines.fastapi_server import Pretrained, batching, naive
from perf.bench.measure import entry
from perf.checkpoint import EMBEDDED
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.load.summary import SLO
from perf.report.results import parse
from perf.roofline.rates import DeviceRates
from perf.servers.baselines import servers
from perf.workload import warm_and_measured

QUESTIONS = [
    ("Return a list of", 7),
    ("This module provides", 12),
    ("A dictionary", 1),
    ("Raise an error if the argument is not a", 9),
    ("The value of", 3),
    ("An exception", 12),
]


@dataclass(frozen=True)
class Recording(Pretrained):
    """The model, with the size and the length of every batch."""

    batches: list[tuple[int, int]] = field(default_factory=list)

    def generate(self, prompts: Sequence[list[int]], tokens: int) -> torch.Tensor:
        self.batches.append((len(prompts), tokens))
        return super().generate(prompts, tokens)


@pytest.fixture(scope="module")
def pretrained() -> Iterator[Recording]:
    threads = torch.get_num_threads()
    # On few shared cores, two threads wait for each other more than they compute.
    torch.set_num_threads(1)
    loaded = Pretrained.load(EMBEDDED, "float32")
    yield Recording(loaded.model, loaded.tokenizer)
    torch.set_num_threads(threads)


@asynccontextmanager
async def client_of(application: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application)
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> dict[str, object]:
    answer = await client.post("/generate", json={"prompt": prompt, "max_tokens": max_tokens})
    assert answer.status_code == 200, answer.text
    completion: dict[str, object] = answer.json()
    return completion


async def answers(application: FastAPI, pretrained: Recording) -> list[dict[str, object]]:
    """Ask all questions at once."""
    pretrained.batches.clear()
    async with client_of(application) as client:
        return await asyncio.gather(*(ask(client, *question) for question in QUESTIONS))


async def test_the_naive_server_computes_one_request_at_a_time(pretrained: Recording) -> None:
    found = await answers(naive(pretrained), pretrained)
    assert [answer["tokens"] for answer in found] == [tokens for _, tokens in QUESTIONS]
    assert sorted(pretrained.batches) == sorted((1, tokens) for _, tokens in QUESTIONS)


async def test_a_batch_gives_every_request_its_own_text(pretrained: Recording) -> None:
    alone = await answers(naive(pretrained), pretrained)
    # With this delay a batch of three never starts before it is full.
    together = await answers(batching(pretrained, 3, 30.0), pretrained)
    assert together == alone
    assert [size for size, _ in pretrained.batches] == [3, 3]
    # Every row is computed for as long as the longest of its batch.
    assert {length for _, length in pretrained.batches} <= {12, 9, 7}
    assert max(length for _, length in pretrained.batches) == 12


async def test_a_single_request_is_computed_after_the_delay(pretrained: Recording) -> None:
    async with client_of(batching(pretrained, 8, 0.01)) as client:
        assert (await ask(client, "A dictionary", 5))["tokens"] == 5


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"prompt": "", "max_tokens": 3}', 422, "prompt"),
        (b'{"prompt": "a", "max_tokens": 0}', 422, "max_tokens"),
        (b'{"prompt": "a"}', 422, "max_tokens"),
        (b'{"prompt": 5, "max_tokens": 3}', 422, "prompt"),
        (b"nonsense", 422, "JSON"),
        (b'{"prompt": "a", "max_tokens": 4000}', 400, "must be at most 512"),
    ],
)
async def test_a_bad_request_is_refused(
    pretrained: Recording, batch: bool, body: bytes, status: int, message: str
) -> None:
    async with client_of(batching(pretrained, 3, 30.0) if batch else naive(pretrained)) as client:
        answer = await client.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, message in answer.text) == (status, True)


@pytest.mark.long
def test_the_report_reads_the_measurement_of_a_started_baseline() -> None:
    rates = DeviceRates("cpu", 1, {2**20: 1e10}, {"fp32": 1e11})
    naive_server = next(one for one in servers() if one.key == "naive_fastapi")
    requests = warm_and_measured(EMBEDDED, "uniform", 2, 4, mean=5)
    with naive_server.start(EMBEDDED, 1) as running:
        run = drive(running.target, requests, Closed(2), 2, 120.0)
        measured = entry(naive_server, running, EMBEDDED, "uniform", run, requests, rates, SLO(60.0, 1.0))
    content = json.loads(json.dumps(measured))
    assert content["command"].startswith(".venv/bin/python -m perf.baselines.fastapi_server --model pydoc-llama ")
    (read,) = parse(result("bench", "make bench", {"peers/closed/uniform": content}), "test").measured("peers")
    assert (read.server, content["family"], read.weights, read.errors) == ("naive_fastapi", "peer", "FP32", 0)
    assert (read.load.mix, read.load.concurrency, read.load.rate_per_second) == ("uniform", 2, None)
    assert read.load.mean_output_tokens == 5
    assert read.goodput is not None
    assert read.goodput.share == 1.0
    assert read.limit is not None
    assert read.limit.fraction > 0
    assert read.memory is not None
    assert read.memory.weights_mib == pytest.approx(21.0, abs=1.5)
    assert read.memory.process_mib is not None
    assert read.memory.process_mib > 100
    assert content["requests"] == 4
    assert (content["whole_run"]["requests"], content["whole_run"]["output_tokens"]) == (6, 30)
