"""Fuzzed requests and random bytes on both ports cause no crash, hang or leak, and valid requests are answered.

The same FUZZ_SEED and source give the same attacks (Hypothesis uses constants of the loaded modules). Nothing is
shrunk, because a crashed server can't be asked again; a failure shows the attacks under way instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from notes import Note
from server.clients import WIRES, ask, generate
from server.fuzzing.grpc_attacks import grpc_calls, grpc_noise
from server.fuzzing.http_attacks import http_noise, http_requests
from server.fuzzing.sending import Attack, Campaign, Good
from server.fuzzing.values import weighted
from server.metrics import Metrics
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

ATTACKS: st.SearchStrategy[Attack] = weighted((5, http_requests()), (5, grpc_calls), (1, http_noise), (1, grpc_noise))


def _attacks(count: int) -> list[Attack]:
    drawn: list[Attack] = []

    @seed(SEED)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(ATTACKS)
    def draw(attack: Attack) -> None:
        drawn.append(attack)

    draw()
    return drawn


def _good(server: LocalTriton) -> list[Good]:
    """Return valid requests over every endpoint, each with the answer it gets alone."""
    good: list[Good] = []
    for number in range(8):
        request = {"text_input": f"Good {number}", "max_tokens": 8, "min_tokens": 8, "temperature": 1.0, "seed": number}
        asks = [partial(ask, server, WIRES[number % len(WIRES)], **request)]
        if is_decoupled(server):
            asks = [partial(ask, server, generate, **request)]
            asks += [partial(whole, server, wire, request) for wire in STREAM_WIRES]
        good += [(one, ask(server, generate, **request)) for one in asks]
    return good


def _resources(server: LocalTriton, metrics: Metrics) -> dict[str, float]:
    """Wait until the server is idle, and read its resources."""
    metrics.wait_for_slots(0)
    return resources.of(ServerProcesses.of(server.pid))


def _check_flat(server: LocalTriton, metrics: Metrics, before: dict[str, float]) -> None:
    """Check that memory, threads and descriptors have not grown."""
    open_before = before["triton_descriptors"]
    metrics.wait(
        lambda _: _resources(server, metrics)["triton_descriptors"] <= open_before + MORE_DESCRIPTORS,
        f"connections are closed; there were {open_before} descriptors",
    )
    after = _resources(server, metrics)
    for process in ("triton", "model"):
        grown = {name: after[f"{process}_{name}"] - before[f"{process}_{name}"] for name in resources.PROCESS}
        assert grown["rss_mib"] < MORE_MIB
        assert grown["threads"] <= MORE_THREADS
        assert grown["descriptors"] <= MORE_DESCRIPTORS
    assert after["shared_memory_mib"] - before["shared_memory_mib"] < MORE_MIB


def _survives(attacks: Sequence[Attack], server: LocalTriton) -> str:
    """Attack a server, and return what came of it.

    One attack in 40 must have been computed and one refused by the model: Triton refuses most itself, under the
    streaming config all of /infer and of unary calls.
    """
    models = model_processes(server.pid)
    metrics = Metrics(server)
    good = _good(server)
    campaign = Campaign(server, good)
    first = int(WARM_UP * len(attacks))
    campaign.run(attacks[:first])
    before = _resources(server, metrics)
    campaign.run(attacks[first:])
    gone = f"it is gone; what was sent last: {campaign.gone}"
    assert server.exit_code is None, gone
    assert not campaign.gone, gone
    assert model_processes(server.pid) == models, gone
    assert (campaign.hung, campaign.spoiled) == ([], [])
    assert len(campaign.sent) == len(attacks)
    _check_flat(server, metrics, before)
    # Valid requests are computed, too: once each for their answers, then in between.
    computed = metrics.grown("llama_requests_total", finish_reason="length") - len(good) - campaign.asked
    refused = metrics.grown("llama_requests_total", finish_reason="invalid")
    assert min(computed, refused) > len(attacks) / 40
    assert metrics.grown("llama_requests_total", finish_reason="error") == 0
    assert [asking() for asking, _ in good] == [answer for _, answer in good]
    return f"{campaign.line()}; {computed:,.0f} attacks computed, {refused:,.0f} refused"


# Attacks that hang take minutes; the failure has to name them before the time is up.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("attacks", [200, pytest.param(2_500, marks=pytest.mark.long)])
def test_fuzzed_requests_neither_crash_nor_hang_nor_leak_nor_change_other_answers(
    fuzzed: LocalTriton, fuzzed_streaming: LocalTriton, note: Note, attacks: int
) -> None:
    """attacks: on each of the two servers."""
    drawn = _attacks(attacks)
    assert len(drawn) == attacks
    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(partial(_survives, drawn), (fuzzed, fuzzed_streaming)):
            note(f"fuzzing, seed {SEED}: {outcome}")
