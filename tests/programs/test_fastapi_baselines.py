"""The article's two servers on a socket, with the embedded checkpoint."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import uvicorn
from fastapi import FastAPI
from unit.made_up_results import result

from perf.baselines import fastapi_server
from perf.baselines.fastapi_server import Pretrained
from perf.bench.session import Session
from perf.checkpoint import EMBEDDED, mebibytes
from perf.load.arrivals import Closed
from perf.load.protocols import Target
from perf.load.summary import SLO
from perf.report.results import Measurement, parse
from perf.roofline.rates import DeviceRates
from perf.servers.server import Running, Server

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


@contextmanager
def serving(application: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "uvicorn has ended"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def naive(pretrained: Recording) -> Iterator[str]:
    with serving(fastapi_server.naive(pretrained)) as url:
        yield url


@pytest.fixture(scope="module")
def batching(pretrained: Recording) -> Iterator[str]:
    # With this delay a batch of three never starts before it is full.
    with serving(fastapi_server.batching(pretrained, 3, 30.0)) as url:
        yield url


def post(url: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def ask(url: str, prompt: str, max_tokens: int) -> dict[str, object]:
    status, answer = post(url, json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode())
    assert status == 200, answer
    completion: dict[str, object] = json.loads(answer)
    return completion


def test_the_naive_server_computes_one_request_at_a_time(naive: str, pretrained: Recording) -> None:
    pretrained.batches.clear()
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = list(pool.map(lambda question: ask(naive, *question), QUESTIONS))
    assert [answer["tokens"] for answer in answers] == [tokens for _, tokens in QUESTIONS]
    assert sorted(pretrained.batches) == sorted((1, tokens) for _, tokens in QUESTIONS)


def test_a_batch_gives_every_request_its_own_text(naive: str, batching: str, pretrained: Recording) -> None:
    alone = [ask(naive, *question) for question in QUESTIONS]
    pretrained.batches.clear()
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda question: ask(batching, *question), QUESTIONS))
    assert together == alone
    assert [size for size, _ in pretrained.batches] == [3, 3]
    # Every row is computed for as long as the longest of its batch.
    assert {length for _, length in pretrained.batches} <= {12, 9, 7}
    assert max(length for _, length in pretrained.batches) == 12


def test_a_single_request_is_computed_after_the_delay(pretrained: Recording) -> None:
    with serving(fastapi_server.batching(pretrained, 8, 0.01)) as url:
        assert ask(url, "A dictionary", 5)["tokens"] == 5


@pytest.mark.parametrize("server", ["naive", "batching"])
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
def test_a_bad_request_is_refused(
    request: pytest.FixtureRequest, server: str, body: bytes, status: int, message: str
) -> None:
    answered, text = post(request.getfixturevalue(server), body)
    assert answered == status
    assert message in text


def test_the_report_reads_a_measurement(naive: str) -> None:
    rates = DeviceRates("cpu", 1, {2**20: 1e10}, {"fp32": 1e11})
    target = Target("naive_fastapi", "fastapi", naive, "llama")
    running = Running(target, "created by a test", {"threads": 1}, os.getpid(), mebibytes(EMBEDDED, "fp32"))
    server = Server("naive_fastapi", "naive FastAPI", "peer", "fp32", _never_started)
    measured = Session(server, running, EMBEDDED).measure("uniform", Closed(2), 4, 2, SLO(60.0, 1.0), rates, mean=5)
    read = _read(measured)
    assert (read.server, measured["family"], read.weights, read.errors) == ("naive_fastapi", "peer", "FP32", 0)
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
    assert measured["requests"] == 4
    whole = measured["whole_run"]
    assert isinstance(whole, dict)
    assert (whole["requests"], whole["output_tokens"]) == (6, 30)


def _read(measurement: dict[str, object]) -> Measurement:
    (read,) = parse(result("bench", "make bench", {"peers/closed/uniform": measurement}), "test").measured("peers")
    return read


@contextmanager
def _never_started(checkpoint: Path, threads: int) -> Iterator[Running]:
    raise AssertionError(f"{checkpoint} is served already, by {threads} threads")
    yield
