"""Processes die and drain under load, and every client gets the answer of the quiet run, byte for byte.

Real tritonservers under their supervisors, Envoy, and the endpoint's own process. `make resumption` is the long form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import pytest
from end_to_end.metrics import level
from end_to_end.servers import EMBEDDED, until
from triton_local.openai_endpoint import OpenAIEndpoint

from perf.resumption.__main__ import Requests, load, resumptions
from perf.resumption.answers import Answers, compare
from perf.resumption.tritons import RestartedTriton, in_front_of, running_tritons
from perf.resumption.workload import mixed

COUNT = 12
"""Requests of each protocol."""
RUNNING = 4
"""Sequences that a server decodes at least when it dies."""


@pytest.fixture(scope="module")
def tritons() -> Iterator[Sequence[RestartedTriton]]:
    with running_tritons(2, EMBEDDED) as pair:
        yield pair


class Served(NamedTuple):
    """An endpoint in front of both, and where clients reach it: at Envoy."""

    endpoint: OpenAIEndpoint
    url: str


@pytest.fixture(scope="module")
def served(tritons: Sequence[RestartedTriton]) -> Iterator[Served]:
    with OpenAIEndpoint("127.0.0.1", 0, 30) as endpoint, in_front_of(tritons, endpoint) as url:
        yield Served(endpoint, url)


@pytest.fixture(scope="module")
def quiet(served: Served) -> Answers:
    return _load(served, lambda: False)


@cache
def _requests() -> Requests:
    return mixed(EMBEDDED, COUNT)


def _load(served: Served, goes_on: Callable[[], bool]) -> Answers:
    return load(served.url, served.endpoint.served_name, _requests(), goes_on)


def _check_while(served: Served, quiet: Answers, disturb: Callable[[], None]) -> int:
    """Send requests until `disturb` returns, and check the answers; return how many have been resumed."""
    before = resumptions(served.endpoint)
    with ThreadPoolExecutor() as threads:
        disturbing = threads.submit(disturb)
        answers = _load(served, lambda: not disturbing.done())
        disturbing.result()
    assert compare(quiet, answers) == ([], [])
    grown = resumptions(served.endpoint) - before
    assert grown["given_up"] == 0
    return grown.total()


def _wait_until_it_decodes(server: RestartedTriton) -> None:
    def decodes() -> bool:
        return level(server.local, "llama_slots_in_use") >= RUNNING

    until(decodes, lambda: f"{server.local.grpc_url} runs {RUNNING} sequences")


def _kill_in_mid_answer(server: RestartedTriton, name: str) -> None:
    _wait_until_it_decodes(server)
    server.kill(name)


def test_answers_survive_the_death_of_tritonserver_and_of_a_model_process(
    tritons: Sequence[RestartedTriton], served: Served, quiet: Answers
) -> None:
    def kill() -> None:
        with ThreadPoolExecutor() as threads:
            list(threads.map(_kill_in_mid_answer, tritons, ("tritonserver", "llama")))

    # Some of those that ran may have ended since the metrics were written.
    assert _check_while(served, quiet, kill) > 0


def test_no_request_fails_while_a_triton_drains_and_is_replaced(
    tritons: Sequence[RestartedTriton], served: Served, quiet: Answers
) -> None:
    def drain() -> None:
        _wait_until_it_decodes(tritons[0])
        tritons[0].restart()

    _check_while(served, quiet, drain)
