"""Processes die and drain under load, and every client gets the answer of the quiet run, byte for byte.

Real tritonservers under their supervisors, and the endpoint's own process. `make resumption` is the long form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from server.metrics import level
from server.servers import EMBEDDED, until
from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.server import LocalTriton

from perf.resumption.__main__ import resumptions
from perf.resumption.answers import Answer, drive
from perf.resumption.mix import Request, mixed
from perf.resumption.tritons import Tritons, processes

COUNT = 24
RUNNING = 4
"""Sequences that a server decodes at least when it dies."""


@pytest.fixture(scope="module")
def tritons() -> Iterator[Tritons]:
    with Tritons(2, EMBEDDED) as pair:
        yield pair


@pytest.fixture(scope="module")
def url(tritons: Tritons) -> Iterator[str]:
    with OpenAIEndpoint("127.0.0.1", 0, 30, str(EMBEDDED)) as endpoint:
        endpoint.start(tritons.addresses)
        yield f"http://{endpoint.address}"


@pytest.fixture(scope="module")
def quiet(url: str) -> list[Answer]:
    return _drive(url, lambda: False)


@cache
def _requests() -> list[Request]:
    return mixed(EMBEDDED.name, EMBEDDED, COUNT)


def _drive(url: str, goes_on: Callable[[], bool]) -> list[Answer]:
    answers = drive(url, _requests(), COUNT, goes_on)
    assert [answer.error for answer in answers if answer.error] == []
    return answers


def _check_while(url: str, quiet: Sequence[Answer], disturb: Callable[[], None]) -> int:
    """Send requests until `disturb` returns, and check the answers; return how many have been resumed."""
    before = resumptions(url)
    with ThreadPoolExecutor() as threads:
        disturbing = threads.submit(disturb)
        answers = _drive(url, lambda: not disturbing.done())
        disturbing.result()
    for answer in answers:
        assert answer.content == quiet[answer.number % COUNT].content, _requests()[answer.number % COUNT]
    grown = resumptions(url) - before
    assert grown["given_up"] == 0
    return grown.total()


def _wait_until_it_decodes(server: LocalTriton) -> None:
    until(lambda: level(server, "llama_slots_in_use") >= RUNNING, lambda: f"{server.grpc_url} runs {RUNNING} sequences")


def _kill_in_mid_answer(server: LocalTriton, name: str) -> None:
    _wait_until_it_decodes(server)
    processes(server)[name].kill()


def test_answers_survive_the_death_of_tritonserver_and_of_a_model_process(
    tritons: Tritons, url: str, quiet: Sequence[Answer]
) -> None:
    def kill() -> None:
        _kill_in_mid_answer(tritons.servers[0], "tritonserver")
        _kill_in_mid_answer(tritons.servers[1], "llama")

    assert _check_while(url, quiet, kill) >= 2 * RUNNING


def test_no_request_fails_while_a_triton_drains(tritons: Tritons, url: str, quiet: Sequence[Answer]) -> None:
    first, second = tritons.servers
    until(lambda: first.exit_code is None and second.exit_code is None, lambda: "both serve again")

    def drain() -> None:
        _wait_until_it_decodes(first)
        first.terminate()
        until(lambda: "llama: model unloaded" in first.log_text(), lambda: "it has drained")

    _check_while(url, quiet, drain)


def test_answers_wait_for_the_only_triton_until_it_is_started_again(
    tritons: Tritons, url: str, quiet: Sequence[Answer]
) -> None:
    first, second = tritons.servers
    assert first.exit_code is not None
    assert _check_while(url, quiet, lambda: _kill_in_mid_answer(second, "tritonserver")) >= RUNNING
