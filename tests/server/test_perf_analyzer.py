"""perf_analyzer against the product: it sends exactly the requests it is given."""

from __future__ import annotations

import pytest
from server.servers import Statistics
from triton_local.server import LocalTriton

from perf.analyzer.run import FailedRunError, measure
from perf.article.configurations import MismatchError, check, configurations
from perf.article.counters import Sampling
from perf.article.measure import TIMEOUT_S
from perf.load.protocols import Request
from perf.load.summary import throughput
from perf.servers.triton import read_back

LENGTHS = [3, 9, 1, 6, 4, 12, 2, 7, 5, 8, 10, 11]
REQUESTS = [Request(f'Return the "{length}" of\nä€𝄞', length) for length in LENGTHS]
CONCURRENCY = WARMUP = 4


def test_every_request_is_sent_once_and_answered_at_its_own_length(triton: LocalTriton) -> None:
    statistics = Statistics(triton)
    with Sampling(triton.metrics_url) as counters:
        report = measure(triton.grpc_url, REQUESTS, CONCURRENCY, WARMUP, TIMEOUT_S)
    run = report.run
    # In the order of the list, as each answer makes way for the next one. The first four may change places.
    sent = [record.output_tokens for record in run.records]
    assert sent[WARMUP:] == LENGTHS[WARMUP:]
    assert sorted(sent[:WARMUP]) == sorted(LENGTHS[:WARMUP])
    assert len(run) == len(REQUESTS) - WARMUP
    assert all(0 < record.latency < run.whole.seconds for record in run)
    window = throughput(run).window
    assert run.whole.begin < window.begin < window.end <= run.whole.end
    assert statistics.rows() == len(REQUESTS)
    assert counters.first <= run.whole.begin
    assert run.whole.end <= counters.last
    assert counters.growth("nv_inference_count", counters.first, counters.last) == len(REQUESTS)
    assert set(report.server_us) == {"queue", "compute_input", "compute_infer", "compute_output"}
    assert report.version[0].isdigit()
    assert "--request-count 12" in report.command


def test_one_failed_request_fails_the_run(triton: LocalTriton) -> None:
    bad = Request("Return", 100_000)
    with pytest.raises(FailedRunError, match="max_tokens is 100000; it must be at most"):
        measure(triton.grpc_url, [*REQUESTS[:5], bad], 2, 2, TIMEOUT_S)


def test_only_the_configuration_that_runs_passes_its_check(triton: LocalTriton) -> None:
    runs = read_back(triton)
    for one in configurations():
        if one.key == "inflight_int8":
            check(one, runs)
        else:
            with pytest.raises(MismatchError, match=f"{one.key} is to be measured"):
                check(one, runs)
