"""Behind NVIDIA Dynamo: answers survive the death of a Triton and of a worker, and turns find their pages."""

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
from end_to_end.clients.dynamo_site import Site
from end_to_end.clients.environments import FOLDER, installed
from end_to_end.clients.question import MODEL
from openai.types.chat import ChatCompletionMessageParam

STREAMS = 32
CHATS = 8
PAGE = 16


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("dynamo")) as site:
        yield site


class Streams:
    """Chats at the same time: half of them greedy, half seeded."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._deltas = 0

    def texts(self, disturb: Callable[[], None] | None = None) -> list[str]:
        """Return their texts. disturb: called while they run."""
        with ThreadPoolExecutor(STREAMS) as pool:
            texts = [pool.submit(self._text, number) for number in range(STREAMS)]
            if disturb is not None:
                while self._deltas < 8 * STREAMS:
                    time.sleep(0.01)
                disturb()
                assert not all(text.done() for text in texts)
            return [text.result() for text in texts]

    def _text(self, number: int) -> str:
        deltas: list[str] = []
        with self._client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"{number}: what does the method number {number} do?"}],
            temperature=number % 2,
            seed=number,
            max_tokens=300,
            extra_body={"ignore_eos": True},
            stream=True,
        ) as stream:
            for event in stream:
                deltas.append(event.choices[0].delta.content or "")
                with self._lock:
                    self._deltas += 1
        return "".join(deltas)


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=site.base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def quiet(client: openai.OpenAI) -> list[str]:
    """The texts of an undisturbed run."""
    return Streams(client).texts()


def test_dynamo_answers_as_openai_does(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert [len(token.top_logprobs) for token in tokens] == [2] * 4


def test_a_guide_holds_behind_dynamo(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        extra_body={"guided_choice": ["a b-c", "(d)"]},
    )
    assert answer.choices[0].message.content in ("a b-c", "(d)")


def test_a_refusal_names_the_input(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens is 5000; it must be at most"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=5000)


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


def test_answers_survive_the_death_of_a_worker(site: Site, client: openai.OpenAI, quiet: list[str]) -> None:
    assert Streams(client).texts(site.replicas[1].kill_worker) == quiet
    site.await_workers(1)
    site.replicas[1].start_worker()


def test_answers_survive_the_death_of_a_triton(site: Site, client: openai.OpenAI, quiet: list[str]) -> None:
    assert Streams(client).texts(site.replicas[0].kill_triton) == quiet
    site.await_workers(1)
    site.replicas[0].restart_triton()
    assert Streams(client).texts() == quiet


def test_the_worker_passes_the_checks_of_dynamos_contract(site: Site) -> None:
    # The checks are tests for the pytest of that environment.
    options = ["-c", os.devnull, f"--rootdir={FOLDER}", "--noconftest", "-p", "no:cacheprovider", "--verbose"]
    python, checks = installed("dynamo") / "bin" / "python", FOLDER / "dynamo_checks.py"
    command: list[str | Path] = [python, "-m", "pytest", *options, checks]
    urls = {"TRITON": site.replicas[0].triton.grpc_url, "TRITON_METRICS": site.replicas[0].triton.metrics_url}
    ended = subprocess.run(command, env={**site.environment, **urls}, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_worker_that_is_told_to_end_with_its_triton_ends(site: Site, client: openai.OpenAI, quiet: list[str]) -> None:
    assert Streams(client).texts(site.replicas[0].terminate) == quiet
    assert site.replicas[0].worker is not None
    assert site.replicas[0].worker.wait(60) == 0
