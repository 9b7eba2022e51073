"""What tables say of their figures: what they are of, what they are compared with, and what they were measured on."""

from __future__ import annotations

from typing import Any, cast

from unit import made_up_results
from unit.markdown_cells import column

from perf.report.run import Run
from perf.report.tables import article, overhead, peers

FILE = "perf/results/made_up.json"


def bench() -> Run:
    return Run(made_up_results.bench(), FILE)


def test_of_a_hundred_requests_there_is_a_99th_percentile() -> None:
    content = made_up_results.bench()
    for one in cast("dict[str, Any]", content["measurements"]).values():
        one["requests"] = 100
    table = article.article(Run(content, FILE))
    assert table is not None
    assert column(table.markdown(), "latency p50 / p95 / p99, s")[4] == "10.3 / 14.5 / 16.5"


def test_without_naive_fp32_all_are_compared_with_naive_fp16() -> None:
    content = made_up_results.bench()
    measurements = cast("dict[str, Any]", content["measurements"])
    del measurements["article/equal/naive_fp32"]
    table = article.article(Run(content, FILE))
    assert table is not None
    assert column(table.markdown(), "over naive FP16") == ["1.00 ×", "4.33 ×", "4.00 ×", "10.3 ×", "11.7 ×"]
    del measurements["article/equal/naive_fp16"]
    table = article.article(Run(content, FILE))
    assert table is not None
    assert not any(title.startswith("over") for title in table.titles)


def test_sixteen_bits_are_not_spoken_of_where_nothing_has_them() -> None:
    content = made_up_results.bench()
    for one in cast("dict[str, Any]", content["measurements"]).values():
        if one.get("weights") == "FP16":
            one["weights"] = "FP32"
    table = article.mixed(Run(content, FILE))
    assert table is not None
    assert not any("slower" in note for note in table.notes)


def test_sixteen_bits_are_not_called_slow_where_they_are_fast() -> None:
    content = made_up_results.bench()
    cast("dict[str, Any]", content["rates"])["operations"] = {"fp32": 1e13, "fp16": 1e14}
    table = article.article(Run(content, FILE))
    assert table is not None
    assert not any("slower" in note for note in table.notes)


def test_the_vram_of_a_device_is_not_called_a_processs() -> None:
    content = made_up_results.bench()
    for one in cast("dict[str, Any]", content["measurements"]).values():
        if "memory" in one:
            one["memory"]["kind"] = "VRAM"
    table = article.article(Run(content, FILE))
    assert table is not None
    assert column(table.markdown(), "VRAM in use on the device, MiB") == ["1,234"] * 6


def test_the_peers_tables_say_what_their_figures_are_of() -> None:
    closed, poisson = peers.closed(bench()), peers.poisson(bench())
    assert closed is not None
    assert poisson is not None
    assert column(closed.markdown(), "limit, tokens/s") == ["4,300"] * 10
    assert column(closed.markdown(), "of the limit")[0] == "14 %"
    assert column(closed.markdown(), "requests") == ["64"] * 10
    assert "while the load was full" in closed.notes[1]
    assert "over the whole run" in poisson.notes[0]


def test_uncommitted_changes_are_admitted() -> None:
    content = made_up_results.bench()
    cast("dict[str, object]", content["machine"])["uncommitted_changes"] = True
    assert "`0123456` with uncommitted changes;" in Run(content, FILE).origin.line()
    cast("dict[str, object]", content["machine"])["changed_during_run"] = True
    assert "`0123456` with uncommitted changes, and changed during the run;" in Run(content, FILE).origin.line()


def test_what_a_table_was_measured_on_stands_beneath_it() -> None:
    table = article.article(bench())
    assert table is not None
    assert table.notes[-1] == (
        "CPU: Made-up 9000, 2 cores (no GPU), 1 thread a server; a made-up Llama; 2001-01-01; commit `0123456`; "
        "Python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0, locust 2.47.0. `make bench` writes "
        "`perf/results/made_up.json`."
    )
    assert "from the first request after the warm-up to the first answer after the last sending" in table.notes[1]
    assert "bandwidth: naive FP16, naive FP32; operations: batched FP16" in table.notes[2]
    assert "FP16 products are 7.60 × slower than FP32 on this device" in table.notes[3]
    assert "10^9 operations/s: FP32 95.0; FP16 12.5." in table.notes[3]
    assert "reads GB/s 36.0 at 32 MiB; products, 10^9 operations/s: fp32 95.0" in table.notes[4]


def test_the_seconds_of_each_whole_say_what_they_are_of() -> None:
    table = overhead.where(bench())
    assert table is not None
    assert column(table.markdown(), "time")[0] == "20.0 s of one run"
    assert column(table.markdown(), "time")[5] == "10.0 s of one request"
    assert any("tokenization is the time that it takes in the bare engine's run" in note for note in table.notes)
