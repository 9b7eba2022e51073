"""Behind NVIDIA Dynamo: answers survive the death of a Triton and the end of a worker, and turns find their pages.

Dynamo is its frontend on this machine, and a worker for each of two replicas.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from end_to_end.clients.conftest import NewReplica, Replica
from end_to_end.clients.environments import FOLDER, installed
from end_to_end.clients.question import MODEL
from end_to_end.metrics import level
from end_to_end.servers import until
from openai.types.chat import ChatCompletionMessageParam
from triton_local.ports import choose_ports

HOST = "127.0.0.1"
STREAMS = 16
CHATS = 8
PAGE = 16


class Site:
    """Everything but the replicas, as a context; files in `home` take the place of etcd."""

    def __init__(self, home: Path, replicas: Sequence[Replica]) -> None:
        self._home = home
        self._port = choose_ports(HOST, {"http": 0})["http"]
        self.base_url = f"http://{HOST}:{self._port}/v1"
        self.replicas = replicas
        self.workers: list[subprocess.Popen[bytes]] = []
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "DYN_FILE_KV": str(home / "discovery"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": HOST,
            "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
            "DYN_EVENT_PLANE_HOST": HOST,
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        options = ["--http-host", HOST, "--http-port", str(self._port), "--router-mode", "kv"]
        self._frontend = self._start("dynamo.frontend", *options, "--migration-limit", "3")

    def __enter__(self) -> Site:
        for replica in self.replicas:
            self.start_worker(replica)
        self.await_workers(len(self.workers))
        return self

    def __exit__(self, *error: object) -> None:
        for process in (*self.workers, self._frontend):
            process.kill()
            process.wait()

    def start_worker(self, replica: Replica) -> None:
        """Start a worker of a replica, the last of `workers`."""
        options = ["--triton", replica.triton.grpc_address, "--triton-metrics", replica.triton.metrics_address]
        kv_events = f"tcp://{HOST}:{replica.kv_events_port}"
        self.workers.append(self._start("triton_llama_dynamo", *options, "--kv-events", kv_events))

    def requests(self) -> list[int]:
        """Return how many requests each Triton has answered."""
        pattern = r'^nv_inference_request_success\{model="llama",version="1"\} (\d+)'
        pages = [httpx.get(f"http://{triton.metrics_address}/metrics").text for triton, _ in self.replicas]
        return [int(count) for page in pages for count in re.findall(pattern, page, re.MULTILINE)]

    def await_workers(self, number: int) -> None:
        """Wait until so many take requests, as the frontend sees it, and serve the model."""
        until(lambda: self._count() == number and self._lists_a_model(), lambda: f"{number} workers serve")

    def _start(self, module: str, *options: str) -> subprocess.Popen[bytes]:
        command: list[str | Path] = [installed("dynamo") / "bin" / "python", "-m", module, *options]
        with (self._home / "log").open("ab") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd=self._home)

    def _count(self) -> int:
        try:
            health = httpx.get(f"http://{HOST}:{self._port}/health").json()
        except httpx.TransportError:
            return 0
        return sum(instance["endpoint"] == "generate" for instance in health["instances"])

    def _lists_a_model(self) -> bool:
        return bool(httpx.get(f"{self.base_url}/models").json()["data"])


@pytest.fixture(scope="module")
def running() -> Iterator[ExitStack]:
    """Ends the Tritons of this module."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def mortal(new_replica: NewReplica, running: ExitStack) -> Replica:
    """A replica that a test kills and starts again."""
    replica = new_replica()
    running.enter_context(replica.triton)
    return replica


@pytest.fixture(scope="module")
def site(replicas: list[Replica], mortal: Replica, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("dynamo"), [replicas[0], mortal]) as site:
        yield site


def _texts(client: openai.OpenAI, disturb: Callable[[], None] | None = None) -> list[str]:
    """Return the texts of chats at the same time, half of them greedy, half seeded. disturb: called while they run."""
    begun = threading.Barrier(STREAMS, disturb)

    def text(number: int) -> str:
        with client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"{number}: what does the method number {number} do?"}],
            temperature=number % 2,
            seed=number,
            max_tokens=300,
            extra_body={"ignore_eos": True},
            stream=True,
        ) as stream:
            deltas = [next(stream)]
            begun.wait(60)
            deltas += stream
        return "".join(delta.choices[0].delta.content or "" for delta in deltas)

    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(text, range(STREAMS)))


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=site.base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def quiet(client: openai.OpenAI) -> list[str]:
    """The texts while nothing disturbs them."""
    return _texts(client)


def test_a_guide_holds_behind_dynamo(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        extra_body={"guided_choice": ["a b-c", "(d)"]},
    )
    assert answer.choices[0].message.content in ("a b-c", "(d)")


def test_second_turns_go_to_the_replica_with_their_pages(site: Site, client: openai.OpenAI) -> None:
    def first_turn(number: int) -> tuple[list[ChatCompletionMessageParam], int]:
        question = f"{number}: what does the function of this name do with the words in the list? " * 3
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)
        assert answer.usage is not None
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        return messages, answer.usage.prompt_tokens

    before = site.requests()
    with ThreadPoolExecutor(CHATS) as pool:
        chats = list(pool.map(first_turn, range(CHATS)))
    assert all(count > earlier for count, earlier in zip(site.requests(), before, strict=True))
    # The events of the pages are on their way. One turn at a time, because a replica with much load gives way.
    time.sleep(3.0)
    for messages, prompt_tokens in chats:
        messages.append({"role": "user", "content": "And then?"})
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= prompt_tokens // PAGE * PAGE


def test_the_worker_passes_the_checks_of_dynamos_contract(site: Site) -> None:
    # The checks are tests for the pytest of that environment.
    options = ["-c", os.devnull, f"--rootdir={FOLDER}", "--noconftest", "-p", "no:cacheprovider", "--verbose"]
    python, checks = installed("dynamo") / "bin" / "python", FOLDER / "dynamo_checks.py"
    command: list[str | Path] = [python, "-m", "pytest", *options, checks]
    env = {"TRITON": site.replicas[0].triton.grpc_address, "TRITON_METRICS": site.replicas[0].triton.metrics_address}
    ended = subprocess.run(command, env={**site.environment, **env}, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _wait_until_it_decodes(replica: Replica) -> None:
    until(lambda: level(replica.triton, "llama_slots_in_use") > 0, lambda: "the replica runs a stream")


def test_answers_survive_a_triton_that_dies_and_comes_back(
    site: Site, client: openai.OpenAI, quiet: list[str], mortal: Replica, new_replica: NewReplica, running: ExitStack
) -> None:
    def kill() -> None:
        _wait_until_it_decodes(mortal)
        mortal.triton.kill()

    assert _texts(client, kill) == quiet
    site.await_workers(1)
    mortal.triton.stop()
    running.enter_context(new_replica(mortal).triton)
    # The worker of that Triton starts itself again.
    site.await_workers(2)


def test_answers_survive_a_worker_that_is_told_to_end(site: Site, client: openai.OpenAI, quiet: list[str]) -> None:
    replica, worker = site.replicas[0], site.workers.pop(0)

    def terminate() -> None:
        _wait_until_it_decodes(replica)
        worker.terminate()

    assert _texts(client, terminate) == quiet
    assert worker.wait(60) == 0
    site.start_worker(replica)
    site.await_workers(2)
