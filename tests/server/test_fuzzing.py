"""Fuzzed requests and random bytes on both ports cause no crash, hang or leak, and valid requests are answered.

FUZZ_SEED in the environment selects other ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import pytest
from hypothesis import strategies as st
from notes import Note
from server.clients import WIRES, ask, generate, generate_url, post
from server.fuzzing.campaign import Campaign, Good, Report, attack
from server.fuzzing.grpc_calls import grpc_calls
from server.fuzzing.http_requests import http_requests
from server.fuzzing.noise import grpc_noise, http_noise
from server.fuzzing.sending import Attack
from server.metrics import PENDING, Metrics
from server.servers import is_decoupled
from server.streams import STREAM_WIRES, whole
from triton_local.server import LocalTriton
from triton_supervisor.process_table import model_processes

from perf.overhead.processes import ServerProcesses
from perf.soak import resources

SEED = int(os.environ.get("FUZZ_SEED", "20261121"))
WARM_UP = 0.2
"""Share of the attacks before the first reading of memory: one-time allocations have happened by then."""

MORE_MIB = 48.0
"""Growth allowed for each process and for shared memory: 25 KB for each of 2,000 attacks after the warm-up."""

MORE_DESCRIPTORS = 4
MORE_THREADS = 8


_kinds: list[st.SearchStrategy[Attack]] = [*[http_requests()] * 5, *[grpc_calls()] * 5, http_noise, grpc_noise]
ATTACKS = st.sampled_from(_kinds).flatmap(lambda strategy: strategy)


def _good(server: LocalTriton) -> list[Good]:
    """Return valid requests over every endpoint, each with the answer it gets alone."""
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
            asks += [partial(whole, server, wire, request) for wire in STREAM_WIRES[:2]]
        good += [Good(one, ask(server, generate, **request)) for one in asks]
    return good


class _Watched:
    """A server under attack: its processes, their resources, its metrics, its answers to valid requests."""

    def __init__(self, name: str, server: LocalTriton) -> None:
        self._server = server
        self._processes = ServerProcesses.of(server.pid)
        self._models = model_processes(server.pid)
        self._metrics = Metrics(server)
        self._good = _good(server)
        self.name = name

    def campaign(self) -> Campaign:
        return Campaign(self._server, self._good)

    def resources(self) -> dict[str, float]:
        """Wait until the server is idle, and read its resources."""
        self._metrics.wait(lambda now: now.idle() and now.now(PENDING) == 0, "every request has ended")
        return resources.of(self._processes)

    def assert_well(self, report: Report) -> None:
        """Check a campaign's findings; after a crash the last attacks are the only evidence."""
        gone = f"{self.name} is gone; what was sent last over each connection: {report.before_it_was_gone}"
        assert self._server.exit_code is None, gone
        assert not report.before_it_was_gone, gone
        assert model_processes(self._server.pid) == self._models, gone
        assert report.hung == []
        assert report.spoiled == []

    def assert_flat(self, before: dict[str, float]) -> None:
        """Check that memory, threads and descriptors have not grown."""
        self._metrics.wait(
            lambda _: self.resources()["triton_descriptors"] <= before["triton_descriptors"] + MORE_DESCRIPTORS,
            f"connections are closed; there were {before['triton_descriptors']} descriptors",
        )
        after = self.resources()
        for process in ("triton", "model"):
            grown = {name: after[f"{process}_{name}"] - before[f"{process}_{name}"] for name in resources.PROCESS}
            assert grown["rss_mib"] < MORE_MIB, self.name
            assert grown["threads"] <= MORE_THREADS, self.name
            assert grown["descriptors"] <= MORE_DESCRIPTORS, self.name
        assert after["shared_memory_mib"] - before["shared_memory_mib"] < MORE_MIB, self.name

    def assert_used(self, reports: Sequence[Report]) -> str:
        """Check that one attack in 40 was computed and one refused by the model; return how many.

        Triton refuses most attacks itself; under the streaming config all of /infer and of unary calls.
        """
        least = sum(report.sent for report in reports) / 40
        # Valid requests are computed, too: once each for their answers, then in between.
        good = len(self._good) + sum(report.good for report in reports)
        rows = {
            "computed": self._metrics.grown("llama_requests_total", finish_reason="length") - good,
            "refused": self._metrics.grown("llama_requests_total", finish_reason="invalid"),
        }
        for what, count in rows.items():
            assert count > least, f"{count} are {what}"
        assert self._metrics.grown("llama_requests_total", finish_reason="error") == 0
        assert [one.ask() for one in self._good] == [one.answer for one in self._good]
        return ", ".join(f"{count:,.0f} {what}" for what, count in rows.items())


# Attacks that hang take minutes; the report has to name them before the time is up.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("attacks", [200, pytest.param(2_500, marks=pytest.mark.long)])
def test_fuzzed_requests_neither_crash_nor_hang_nor_leak_nor_change_other_answers(
    fuzzed: LocalTriton, fuzzed_streaming: LocalTriton, note: Note, attacks: int
) -> None:
    """attacks: on each of the two servers."""
    servers = [_Watched("fuzzed", fuzzed), _Watched("fuzzed_streaming", fuzzed_streaming)]
    first_ones = int(WARM_UP * attacks)
    reports = _attack(servers, first_ones, SEED)
    before = [server.resources() for server in servers]
    more = _attack(servers, attacks - first_ones, SEED + 1)
    for server, first, second, then in zip(servers, reports, more, before, strict=True):
        assert first.sent + second.sent == attacks
        server.assert_flat(then)
        used = server.assert_used([first, second])
        note(f"{server.name}, seed {SEED}: {first.line()}; then {second.line()}; rows of attacks {used}")


def test_a_parameter_that_is_not_utf_8_is_refused(fuzzed: LocalTriton) -> None:
    """Fuzzing found an internal error here."""
    metrics = Metrics(fuzzed)
    for body in (b'{"text_input": "x", "\xcc": 1}', b'{"text_input": "x", "temprature": "\xff"}'):
        status, answer = post(generate_url(fuzzed), body)
        assert status == 400
        assert "parameters that are not UTF-8" in json.loads(answer)["error"]
    metrics.wait_for(2, "llama_requests_total", finish_reason="invalid")
    assert metrics.grown("llama_requests_total", finish_reason="error") == 0


def _attack(servers: Sequence[_Watched], count: int, number: int) -> list[Report]:
    """Send that many attacks to each server, check that all are well, and return the reports."""
    with ExitStack() as sending:
        campaigns = [sending.enter_context(server.campaign()) for server in servers]
        attack(campaigns, ATTACKS, count, number)
    for server, campaign in zip(servers, campaigns, strict=True):
        server.assert_well(campaign.report)
    return [campaign.report for campaign in campaigns]
