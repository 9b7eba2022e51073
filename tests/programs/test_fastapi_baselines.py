"""The article's two servers with the embedded checkpoint, and a measurement of one started as in a benchmark."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch
from fastapi import FastAPI
from perf.baselines.fastapi_server import Completion, Pretrained, batching, naive

from perf.bench.measure import entry
from perf.checkpoint import EMBEDDED
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.load.summary import SLO
from perf.report.results import RESULTS, parse
from perf.report.tables import peers_closed
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


class Recording(Pretrained):
    """The model, with the lengths of every batch."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        super().__init__(checkpoint, dtype)
        self.batches: list[list[int]] = []

    def complete(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[Completion]:
        self.batches.append(list(lengths))
        return super().complete(prompts, lengths)


@pytest.fixture(scope="module")
def pretrained() -> Iterator[Recording]:
    threads = torch.get_num_threads()
    # On few shared cores, two threads wait for each other more than they compute.
    torch.set_num_threads(1)
    yield Recording(EMBEDDED, "float32")
    torch.set_num_threads(threads)


@asynccontextmanager
async def client_of(application: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application)
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client,
    ):
        yield client


async def answers(application: FastAPI, questions: Sequence[tuple[str, int]]) -> list[dict[str, object]]:
    """Ask all questions at once."""
    async with client_of(application) as client:
        bodies = [{"prompt": prompt, "max_tokens": tokens} for prompt, tokens in questions]
        return [one.json() for one in await asyncio.gather(*(client.post("/generate", json=one) for one in bodies))]


async def test_a_batch_gives_every_request_its_own_text_and_the_naive_server_computes_one_at_a_time(
    pretrained: Recording,
) -> None:
    pretrained.batches.clear()
    alone = await answers(naive(pretrained), QUESTIONS)
    assert [answer["tokens"] for answer in alone] == [tokens for _, tokens in QUESTIONS]
    assert sorted(pretrained.batches) == sorted([tokens] for _, tokens in QUESTIONS)
    pretrained.batches.clear()
    # With this delay a batch of three never starts before it is full.
    assert await answers(batching(pretrained, 3, 30.0), QUESTIONS) == alone
    assert [len(lengths) for lengths in pretrained.batches] == [3, 3]


async def test_a_single_request_is_computed_after_the_delay(pretrained: Recording) -> None:
    (answer,) = await answers(batching(pretrained, 8, 0.01), [("A dictionary", 5)])
    assert answer["tokens"] == 5


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"prompt": "", "max_tokens": 3}', 422, "prompt"),
        (b'{"prompt": "a", "max_tokens": 0}', 422, "max_tokens"),
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
    server = next(one for one in servers() if one.key == "naive_fastapi")
    requests = warm_and_measured(EMBEDDED, "uniform", 2, 4, mean=5)
    with server.start(EMBEDDED, 1) as running:
        run = drive(running.target, requests, Closed(2), 2, 120.0)
        measured = entry(server, running, EMBEDDED, "uniform", run, requests, rates, SLO(60.0, 1.0))
    found = json.loads(json.dumps(measured))
    assert found["command"].startswith(".venv/bin/python -m perf.baselines.fastapi_server --model pydoc-llama ")
    assert (found["server"], found["family"], found["weights"], found["errors"]) == ("naive_fastapi", "peer", "FP32", 0)
    load = {"mix": "uniform", "concurrency": 2, "rate_per_second": None, "mean_output_tokens": 5}
    assert {name: found["load"][name] for name in load} == load
    assert found["goodput"]["share"] == 1.0
    assert found["limit"]["fraction"] > 0
    assert found["memory"]["weights_mib"] == pytest.approx(21.0, abs=1.5)
    assert found["memory"]["process_mib"] > 100
    assert (found["requests"], found["whole_run"]["requests"], found["whole_run"]["output_tokens"]) == (4, 6, 30)
    content = json.loads((RESULTS / "bench.json").read_text())
    content["measurements"] = {"peers/closed/uniform/naive_fastapi": found}
    assert peers_closed(parse(content, "test")).rows[0][:2] == ["uniform, mean 5", "naive FastAPI"]
