"""The article's two servers, for real: uvicorn on a socket, the embedded checkpoint, answers as they should be."""

from __future__ import annotations

import json
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

from perf import checkpoint as weights
from perf.checkpoint import EMBEDDED
from perf.load.arrivals import Closed
from perf.load.protocols import Target
from perf.load.summary import SLO
from perf.peers import batching_fastapi, naive_fastapi
from perf.peers.contestant import Contestant, Started
from perf.peers.fastapi_server import Pretrained
from perf.peers.measure import Server
from perf.report.results import Measurement, parse
from perf.roofline.rates import DeviceRates

QUESTIONS = [
    ("Return a list of", 7),
    ("This module provides", 12),
    ("A dictionary", 1),
    ("Raise an error if the argument is not a", 9),
    ("The value of", 3),
    ("An exception", 12),
]


@dataclass(frozen=True)
class Noting(Pretrained):
    """The real thing, which also notes the size and the length of every batch."""

    batches: list[tuple[int, int]] = field(default_factory=list)

    def generate(self, prompts: Sequence[list[int]], tokens: int) -> torch.Tensor:
        self.batches.append((len(prompts), tokens))
        return super().generate(prompts, tokens)


@pytest.fixture(scope="module")
def pretrained() -> Iterator[Noting]:
    threads = torch.get_num_threads()
    # On the machine's few and shared cores, two threads wait for each other more than they compute.
    torch.set_num_threads(1)
    loaded = Pretrained.load(EMBEDDED, "float32")
    yield Noting(loaded.model, loaded.tokenizer)
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
def naive(pretrained: Noting) -> Iterator[str]:
    with serving(naive_fastapi.application(pretrained)) as url:
        yield url


@pytest.fixture(scope="module")
def batching(pretrained: Noting) -> Iterator[str]:
    # So long a delay that a batch of three never starts before it is full.
    with serving(batching_fastapi.application(pretrained, 3, 30.0)) as url:
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


def test_the_naive_server_computes_requests_together(naive: str, pretrained: Noting) -> None:
    pretrained.batches.clear()
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = list(pool.map(lambda question: ask(naive, *question), QUESTIONS))
    assert [answer["tokens"] for answer in answers] == [tokens for _, tokens in QUESTIONS]
    assert sorted(pretrained.batches) == sorted((1, tokens) for _, tokens in QUESTIONS)


def test_a_batch_gives_somebody_else_s_text_or_length(naive: str, batching: str, pretrained: Noting) -> None:
    alone = [ask(naive, *question) for question in QUESTIONS]
    pretrained.batches.clear()
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda question: ask(batching, *question), QUESTIONS))
    assert together == alone
    assert [size for size, _ in pretrained.batches] == [3, 3]
    # Everyone is computed as long as the longest of the batch.
    assert {length for _, length in pretrained.batches} <= {12, 9, 7}
    assert max(length for _, length in pretrained.batches) == 12


def test_who_is_alone_waits_for_company_for_ever(pretrained: Noting) -> None:
    with serving(batching_fastapi.application(pretrained, 8, 0.01)) as url:
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
def test_a_bad_request_is_computed(
    request: pytest.FixtureRequest, server: str, body: bytes, status: int, message: str
) -> None:
    answered, text = post(request.getfixturevalue(server), body)
    assert answered == status
    assert message in text


def test_a_measurement_is_another_one_than_the_report_reads(naive: str) -> None:
    rates = DeviceRates("cpu", 1, {2**20: 1e10}, {"fp32": 1e11})
    target = Target("naive_fastapi", "fastapi", naive, "llama")
    started = Started(target, "made by a test", {"threads": 1}, _own_pid(), weights.mebibytes(EMBEDDED, "fp32"))
    contestant = Contestant("naive_fastapi", "naive FastAPI", "peer", "fp32", _never_started)
    server = Server(contestant, started, EMBEDDED)
    measured = server.measure("uniform", Closed(2), 4, 2, SLO(60.0, 1.0), rates, mean=5)
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


def _own_pid() -> int:
    return int(Path("/proc/self").readlink().name)


@contextmanager
def _never_started(checkpoint: Path, threads: int) -> Iterator[Started]:
    raise AssertionError(f"{checkpoint} is served already, by {threads} threads")
    yield
