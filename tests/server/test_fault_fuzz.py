"""Five thousand fuzzed requests, and rubbish, on both ports: no crash, hang or leak, and good ones in between go well.

FUZZ_SEED in the environment draws other ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import pytest
from hypothesis import strategies as st
from notes import Note
from server.clients import WIRES, Answer, ask, generate, generate_url, post
from server.fleet import Fleet
from server.fuzzing.attacks import Attack
from server.fuzzing.campaign import Campaign, Good, Report, attack
from server.fuzzing.grpc_calls import grpc_calls
from server.fuzzing.http_requests import http_requests
from server.fuzzing.noise import grpc_noise, http_noise
from server.metrics import PENDING, Metrics
from server.servers import is_decoupled
from server.streams import STREAM_WIRES, StreamWire
from triton_local.server import LocalTriton
from triton_supervisor.process_table import model_processes

from perf.overhead.processes import ServerProcesses
from perf.soak.resources import ServerResources

SEED = int(os.environ.get("FUZZ_SEED", "20261121"))
ATTACKS = 2_500
"""On each of the two servers, those of the warm-up included."""

LEAST_OF_A_KIND = ATTACKS / 40
"""Rows that are computed, and that are refused by the model: most attacks get no further than Triton, which itself
refuses all of /infer and of unary calls under the streaming config.
"""

WARM_UP = 500
"""Attacks before the looks that are compared: what is allocated once is there by then."""

MORE_MIB = 48.0
"""By which each process and what they share may grow: 25 KB for each attack after the warm-up."""

MORE_DESCRIPTORS = 4
MORE_THREADS = 8


_kinds: list[st.SearchStrategy[Attack]] = [*[http_requests()] * 5, *[grpc_calls()] * 5, http_noise, grpc_noise]
attacks = st.sampled_from(_kinds).flatmap(lambda strategy: strategy)


@pytest.fixture(scope="module")
def fuzzed(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("fuzzed") as server:
        yield server


@pytest.fixture(scope="module")
def fuzzed_streaming(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("fuzzed_streaming") as server:
        yield server


def _streamed(server: LocalTriton, wire: StreamWire, request: dict[str, object]) -> Answer:
    return wire(server, request).whole


def _good(server: LocalTriton) -> list[Good]:
    """Return good requests over every wire, each with its answer when nobody else is there."""
    good = []
    for number in range(8):
        request: dict[str, object] = {
            "text_input": f"Good request number {number}",
            "max_tokens": 8,
            "min_tokens": 8,
            "temperature": float(number % 2),
            "seed": number,
        }
        asks = [partial(ask, server, WIRES[number % len(WIRES)], **request)]
        if is_decoupled(server):
            asks = [partial(ask, server, generate, **request)]
            asks += [partial(_streamed, server, wire, request) for wire in STREAM_WIRES[:2]]
        good += [Good(one, ask(server, generate, **request)) for one in asks]
    return good


class _Watched:
    """A server while it is attacked: its processes and what they take, its metrics, its answers to good requests."""

    def __init__(self, name: str, server: LocalTriton) -> None:
        self._server = server
        self._processes = ServerProcesses.of(server.pid)
        self._models = model_processes(server.pid)
        self._metrics = Metrics(server)
        self._good = _good(server)
        self.name = name

    def campaign(self) -> Campaign:
        return Campaign(self._server, self._good)

    def vitals(self) -> ServerResources:
        """Wait until nobody is served any more, and look."""
        self._metrics.wait(lambda now: now.idle() and now.now(PENDING) == 0, "every row has ended and nobody waits")
        return ServerResources.of(self._processes)

    def assert_well(self, report: Report) -> None:
        """Check what came of a campaign; what it says of a crash is all there is to find its cause."""
        gone = f"{self.name} is gone; what was sent last over each connection: {report.before_it_was_gone}"
        assert self._server.exit_code is None, gone
        assert not report.before_it_was_gone, gone
        assert model_processes(self._server.pid) == self._models, gone
        assert report.hung == []
        assert report.spoiled == []

    def assert_flat(self, before: ServerResources) -> None:
        """Check that nothing has grown that would grow on."""
        self._metrics.wait(
            lambda _: self.vitals().triton.descriptors <= before.triton.descriptors + MORE_DESCRIPTORS,
            f"connections are closed; there were {before.triton.descriptors} descriptors",
        )
        after = self.vitals()
        for was, now in ((before.triton, after.triton), (before.model, after.model)):
            assert now.rss_mib - was.rss_mib < MORE_MIB, self.name
            assert now.threads - was.threads <= MORE_THREADS, self.name
            assert now.descriptors - was.descriptors <= MORE_DESCRIPTORS, self.name
        assert after.shared_memory_mib - before.shared_memory_mib < MORE_MIB, self.name

    def assert_used(self, reports: Sequence[Report]) -> str:
        """Check that it was worth something: many attacks got as far as the model, to be computed or to be refused.

        Returns how many, for the end of a run.
        """
        # The good requests are computed, too: once each to know their answers, then in between.
        good = len(self._good) + sum(report.good for report in reports)
        rows = {
            "computed": self._metrics.grown("llama_requests_total", finish_reason="length") - good,
            "refused": self._metrics.grown("llama_requests_total", finish_reason="invalid"),
        }
        for what, count in rows.items():
            assert count > LEAST_OF_A_KIND, f"{count} are {what}"
        assert self._metrics.grown("llama_requests_total", finish_reason="error") == 0
        assert [one.ask() for one in self._good] == [one.answer for one in self._good]
        return ", ".join(f"{count:,.0f} {what}" for what, count in rows.items())


# Attacks that hang, and good requests behind them, take minutes: who they were is to be told before time is up.
@pytest.mark.timeout(1200)
def test_fuzzed_requests_crash_hang_leak_or_spoil(
    fuzzed: LocalTriton, fuzzed_streaming: LocalTriton, note: Note
) -> None:
    servers = [_Watched("fuzzed", fuzzed), _Watched("fuzzed_streaming", fuzzed_streaming)]
    reports = _attack(servers, WARM_UP, SEED)
    before = [server.vitals() for server in servers]
    more = _attack(servers, ATTACKS - WARM_UP, SEED + 1)
    for server, first, second, vitals in zip(servers, reports, more, before, strict=True):
        assert first.sent + second.sent == ATTACKS
        server.assert_flat(vitals)
        used = server.assert_used([first, second])
        note(f"{server.name}, seed {SEED}: {first.line()}; then {second.line()}; rows of attacks {used}")


def test_a_parameter_that_is_no_text_is_a_fault_of_ours(fuzzed: LocalTriton) -> None:
    """Found by fuzzing."""
    metrics = Metrics(fuzzed)
    for body in (b'{"text_input": "x", "\xcc": 1}', b'{"text_input": "x", "temprature": "\xff"}'):
        status, answer = post(generate_url(fuzzed), body)
        assert status == 400
        assert "parameters that are not UTF-8" in json.loads(answer)["error"]
    metrics.wait_for(2, "llama_requests_total", finish_reason="invalid")
    assert metrics.grown("llama_requests_total", finish_reason="error") == 0


def _attack(servers: Sequence[_Watched], count: int, number: int) -> list[Report]:
    """Send so many attacks to each, and return what came of it when all servers are well."""
    with ExitStack() as sending:
        campaigns = [sending.enter_context(server.campaign()) for server in servers]
        attack(campaigns, attacks, count, number)
    for server, campaign in zip(servers, campaigns, strict=True):
        server.assert_well(campaign.report)
    return [campaign.report for campaign in campaigns]
