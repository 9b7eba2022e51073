"""Behind NVIDIA Dynamo: answers survive the death of a Triton and the end of a worker, and turns find their pages."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from end_to_end.clients.conftest import NewReplica, Replica
from end_to_end.clients.dynamo_site import Site
from end_to_end.clients.environments import FOLDER, installed
from end_to_end.clients.question import MODEL
from end_to_end.metrics import level
from end_to_end.servers import until
from openai.types.chat import ChatCompletionMessageParam

STREAMS = 16
CHATS = 8
PAGE = 16


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
