"""Behind NVIDIA Dynamo: answers survive the death of a Triton, and turns find their pages."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from end_to_end.clients.conftest import NewReplica, Replica
from end_to_end.clients.dynamo_site import Site
from end_to_end.clients.environments import FOLDER, installed
from end_to_end.clients.question import MODEL
from openai.types.chat import ChatCompletionMessageParam

STREAMS = 16
CHATS = 8
PAGE = 16


@pytest.fixture(scope="module")
def mortal(new_replica: NewReplica) -> Iterator[Replica]:
    """A replica that a test kills."""
    replica = new_replica()
    with replica.triton:
        yield replica


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
    urls = {"TRITON": site.replicas[0].triton.grpc_url, "TRITON_METRICS": site.replicas[0].triton.metrics_url}
    ended = subprocess.run(command, env={**site.environment, **urls}, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_answers_survive_the_death_of_a_triton(site: Site, client: openai.OpenAI, mortal: Replica) -> None:
    quiet = _texts(client)
    assert _texts(client, mortal.triton.kill) == quiet
    site.await_workers(1)


def test_a_worker_that_is_told_to_end_ends(site: Site) -> None:
    """The last test: no worker is left."""
    site.workers[0].terminate()
    assert site.workers[0].wait(60) == 0
