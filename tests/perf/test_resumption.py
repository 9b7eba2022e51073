"""Processes die and drain under load, and every client gets the answer of the quiet run, byte for byte.

Real tritonservers under their supervisors, Envoy, and the endpoint's own process. `make resumption` is the long form.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from end_to_end.metrics import level
from end_to_end.servers import EMBEDDED, until
from triton_local.openai_endpoint import OpenAIEndpoint

from perf.resumption.__main__ import load, resumptions
from perf.resumption.answers import compare
from perf.resumption.tritons import RestartedTriton, in_front_of, running_tritons
from perf.resumption.workload import mixed

COUNT = 12
"""Requests of each protocol."""
RUNNING = 4
"""Sequences that a server decodes at least when it dies."""


def _wait_until_it_decodes(server: RestartedTriton) -> None:
    def decodes() -> bool:
        return level(server.local, "llama_slots_in_use") >= RUNNING

    until(decodes, lambda: f"{server.local.grpc_address} runs {RUNNING} sequences")


def _kill(server: RestartedTriton, name: str) -> None:
    _wait_until_it_decodes(server)
    server.kill(name)


def test_answers_survive_deaths_and_a_rolling_restart_of_tritons() -> None:
    """One tritonserver and another one's model process are killed; then each in turn drains and is replaced."""
    requests = mixed(EMBEDDED, COUNT)
    with (
        running_tritons(2, EMBEDDED) as tritons,
        OpenAIEndpoint("127.0.0.1", 0, 30) as endpoint,
        in_front_of(tritons, endpoint) as url,
    ):
        quiet = load(url, endpoint.served_name, requests, lambda: False)
        before = resumptions(endpoint)

        def disturb() -> None:
            with ThreadPoolExecutor() as threads:
                list(threads.map(_kill, tritons, ("tritonserver", "llama")))
            for triton in tritons:
                _wait_until_it_decodes(triton)
                triton.restart()

        with ThreadPoolExecutor() as threads:
            disturbing = threads.submit(disturb)
            answers = load(url, endpoint.served_name, requests, lambda: not disturbing.done())
            disturbing.result()
        assert compare(quiet, answers) == ([], [])
        grown = resumptions(endpoint) - before
    assert grown["given_up"] == 0
    # Some of those that ran may have ended since the metrics were written.
    assert grown.total() > 0
