"""perf_analyzer against the product; test_bench.py has its measurement."""

from __future__ import annotations

import pytest
from triton_local.server import LocalTriton

from perf.analyzer.binary import AnalyzerError
from perf.analyzer.run import measure
from perf.load.protocols import Request
from perf.servers.running import NotRunError
from perf.servers.triton import read_back

REQUESTS = [Request(f'Return the "{length}" of\nä€𝄞', length) for length in (3, 9, 1, 6, 4)]


def test_one_failed_request_fails_the_run(triton: LocalTriton) -> None:
    bad = Request("Return", 100_000)
    with pytest.raises(AnalyzerError, match="max_tokens is 100000; it must be at most"):
        measure(triton.grpc_url, [*REQUESTS, bad], 2, 2, 120.0)


def test_a_server_of_other_weights_is_not_measured(triton: LocalTriton) -> None:
    log = triton.log_text()
    loaded, steps, mebibytes = read_back(log, "int8")
    assert loaded.startswith("loaded ")
    assert "INT8" in steps
    assert mebibytes > 1
    with pytest.raises(NotRunError, match=r"its linear layers are int8, not float32"):
        read_back(log, "fp32")
