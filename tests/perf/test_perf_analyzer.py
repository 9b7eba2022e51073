"""perf_analyzer against the product: it sends exactly the requests it is given."""

from __future__ import annotations

import pytest
from server.servers import Statistics
from triton_local.server import LocalTriton

from perf.analyzer.binary import AnalyzerError
from perf.analyzer.run import measure
from perf.bench.counters import Samples, sampled
from perf.load.protocols import Request
from perf.load.records import Run
from perf.servers.running import NotRunError
from perf.servers.triton import read_back

LENGTHS = [3, 9, 1, 6, 4, 12, 2, 7, 5, 8, 10, 11]
REQUESTS = [Request(f'Return the "{length}" of\nä€𝄞', length) for length in LENGTHS]
CONCURRENCY = WARMUP = 4


def _load(triton: LocalTriton, last: bool = False) -> tuple[Run, str, Statistics, Samples]:
    """Measure the requests, once more if perf_analyzer leaves an empty export (rare; docs/decisions.md)."""
    statistics = Statistics(triton)
    try:
        with sampled(triton.metrics_url) as counters:
            run, command = measure(triton.grpc_url, REQUESTS, CONCURRENCY, WARMUP, 120.0)
    except AnalyzerError as error:
        if last or "empty profile export" not in str(error):
            raise
        return _load(triton, last=True)
    return run, command, statistics, counters


def test_every_request_is_answered_at_its_own_length(triton: LocalTriton) -> None:
    run, command, statistics, counters = _load(triton)
    # In the order of the list, as each answer makes way for the next one. The first four may change places.
    sent = [record.output_tokens for record in run.records]
    assert sent[WARMUP:] == LENGTHS[WARMUP:]
    assert sorted(sent[:WARMUP]) == sorted(LENGTHS[:WARMUP])
    assert len(run.measured) == len(REQUESTS) - WARMUP
    begin, end = run.records[0].scheduled, max(record.ended for record in run.records)
    assert all(0 < record.latency < end - begin for record in run.measured)
    window = run.steady
    assert window is not None
    assert begin < window.begin < window.end <= end
    assert statistics.rows() == len(REQUESTS)
    first, last = counters.readings[0][0], counters.readings[-1][0]
    assert first <= begin < end <= last
    assert counters.growth("nv_inference_count", first, last) == len(REQUESTS)
    assert "--request-count 12" in command


def test_one_failed_request_fails_the_run(triton: LocalTriton) -> None:
    bad = Request("Return", 100_000)
    with pytest.raises(AnalyzerError, match="max_tokens is 100000; it must be at most"):
        measure(triton.grpc_url, [*REQUESTS[:5], bad], 2, 2, 120.0)


def test_a_server_of_other_weights_is_not_measured(triton: LocalTriton) -> None:
    log = triton.log_text()
    loaded, steps, mebibytes = read_back(log, "int8")
    assert loaded.startswith("loaded ")
    assert "INT8" in steps
    assert mebibytes > 1
    with pytest.raises(NotRunError, match=r"its linear layers are int8, not float32"):
        read_back(log, "fp32")
