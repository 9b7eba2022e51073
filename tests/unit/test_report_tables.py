"""What the tables say, from results that nobody measured."""

from __future__ import annotations

from typing import Any, cast

import pytest
from unit import made_up_results
from unit.markdown_cells import column

from perf.report.cells import figure, percent
from perf.report.fields import ResultError
from perf.report.run import Run
from perf.report.tables import article, gpu, overhead, peers
from perf.report.tables.quality import quality
from perf.report.tables.tune import tune

FILE = "perf/results/made_up.json"


def bench() -> Run:
    return Run(made_up_results.bench(), FILE)


def changed(path: str, value: object) -> Run:
    """The bench results with one field of naive_fp16's changed, or taken out."""
    content = made_up_results.bench()
    fields = cast("dict[str, Any]", content["measurements"])["article/equal/naive_fp16"]
    *parents, last = path.split("/")
    for parent in parents:
        fields = fields[parent]
    if value is None:
        del fields[last]
    else:
        fields[last] = value
    return Run(content, FILE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (1234.5, "1,234"),
        (-2.5, "-2.50"),
    ],
)
def test_three_digits_and_no_exponents(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.0512, "5.1 %"), (0.264, "26 %"), (0.987, "98.7 %"), (0.9996, "99.96 %"), (1, "100 %")],
)
def test_a_share_below_all_is_never_shown_as_all(share: float, text: str) -> None:
    assert percent(share) == text


def test_the_article_table_has_what_was_measured() -> None:
    table = article.article(bench())
    assert table is not None
    text = table.markdown()
    assert column(text, "server") == [title for title, *_ in made_up_results.OURS.values()]
    assert column(text, "weights, MiB")[3] == "INT8, 33.4"
    assert column(text, "memory of the processes (PSS), MiB") == ["1,234"] * 6
    assert column(text, "requests") == ["64"] * 6
    assert column(text, "latency p50 / p95 / max, s")[4] == "10.3 / 14.5 / 17.5"
    assert column(text, "tokens/s") == ["60.0", "100", "260", "240", "620", "700"]
    assert column(text, "over naive FP32") == ["0.600 ×", "1.00 ×", "2.60 ×", "2.40 ×", "6.20 ×", "7.00 ×"]
    assert column(text, "rows a step")[0] == "0.930"
    assert column(text, "limit, tokens/s")[4] == "5,200"
    assert column(text, "of the limit")[4] == "12 %"


def test_each_mix_is_compared_with_its_own_baseline() -> None:
    table = article.mixed(bench())
    assert table is not None
    text = table.markdown()
    assert column(text, "new tokens") == ["uniform, mean 200"] * 6 + ["geometric, mean 200"] * 6
    assert column(text, "over naive FP32")[4] == "4.77 ×"
    assert column(text, "over naive FP32")[10] == "3.44 ×"


def test_a_server_that_did_not_run_is_named_with_the_reason_and_has_no_row() -> None:
    table = peers.closed(bench())
    assert table is not None
    assert "vLLM" not in str(table.rows)
    assert "Not run: vLLM (no wheel for this made-up machine)." in table.notes


def test_errors_stand_beside_the_servers_name() -> None:
    table = article.article(changed("errors", 3))
    assert table is not None
    assert table.rows[0][0] == "naive FP16 (3 errors)"


def test_a_server_that_answered_nothing_has_no_row() -> None:
    content = made_up_results.bench()
    one = cast("dict[str, Any]", content["measurements"])["article/equal/naive_fp16"]
    one["errors"] = 64
    del one["latency_ms"]
    table = article.article(Run(content, FILE))
    assert table is not None
    assert len(table.rows) == 5
    assert "Not run: naive FP16 (all 64 requests failed)." in table.notes


def test_poisson_has_goodput_and_its_objective_and_a_dash_where_nothing_streams() -> None:
    table = peers.poisson(bench())
    assert table is not None
    text = table.markdown()
    assert column(text, "sent, requests/s") == ["1.50"] * 5
    assert column(text, "first token p50 / p95, ms")[2] == "–"
    assert column(text, "within the objective")[0] == "97.0 %"
    assert any(note.startswith("Objective: the first token within 2.00 s and 100 ms") for note in table.notes)


def test_the_sweep_has_a_row_for_each_concurrency() -> None:
    table = article.sweep(Run(made_up_results.sweep(), FILE))
    assert table is not None
    assert [row[0] for row in table.rows] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert column(table.markdown(), "in-flight INT8, tokens/s / p95 s / of the limit")[5] == "620 / 14.5 / 12 %"
    assert table.notes[1].startswith("64 requests were measured for each figure. Throughput is that while")


def test_quality_has_the_distance_of_each_way_to_quantize() -> None:
    table = quality(Run(made_up_results.quality(), FILE))
    assert table is not None
    text = table.markdown()
    assert column(text, "perplexity") == ["35.797", "35.811", "35.811"]
    assert column(text, "KL divergence mean / p99, nats") == ["–", "0.000420 / 0.00310", "0.000420 / 0.00310"]
    assert column(text, "same best token")[1] == "98.8 %"


def test_tuning_shows_the_front_and_what_is_recommended() -> None:
    table = tune(Run(made_up_results.tune(), FILE))
    assert table is not None
    text = table.markdown()
    assert column(text, "slots") == ["64", "32", "16", "8"]
    assert column(text, "") == ["", "recommended", "", ""]
    assert "6 points were measured" in table.notes[0]


def test_overhead_compares_each_run_with_what_is_inside_of_it() -> None:
    table = overhead.overhead(bench())
    assert table is not None
    text = table.markdown()
    assert column(text, "tokens/s") == ["610", "640", "700", "710"]
    assert column(text, "of the next row's") == ["95.3 %", "91.4 %", "98.6 %", "–"]
    assert column(text, "of the last row's") == ["86 %", "90.1 %", "98.6 %", "–"]


def test_the_parts_are_indented_below_their_wholes_and_small_ones_counted() -> None:
    table = overhead.where(bench())
    assert table is not None
    assert [row[0].strip() for row in table.rows][:3] == ["bare engine", "step", "forward"]
    assert [len(row[0]) - len(row[0].lstrip()) for row in table.rows] == [0, 4, 8, 8, 4, 0, 4]
    assert "less than 1 % each: 1 of 8 parts" in table.notes[0]


def test_nothing_measured_is_no_table() -> None:
    run = Run({**made_up_results.bench(), "measurements": {}, "overhead": None}, FILE)
    assert [
        make(run)
        for make in (article.article, article.mixed, article.sweep, peers.closed, peers.poisson, overhead.overhead)
    ] == [None] * 6


def on_a_gpu(**measurements: object) -> Run:
    return Run(made_up_results.gpu(measurements), FILE)


def test_the_engine_on_a_gpu_is_told_from_generate_and_its_stock_layers() -> None:
    stock = {**made_up_results.WAVE, "steps": "decode steps: stock kernels, launched"}
    found = gpu.decoding(
        on_a_gpu(
            **{
                "decode/int8/32": made_up_results.STEPPED,
                "stock/int8/32": made_up_results.WAVE,
                "stock_engine/int8/32": {**stock, "step_ms": None},
                "decode/fp16/32": {"not_run": "CUDA error"},
                "products/1x1/1": {"not_run": "no time"},
            }
        )
    )
    assert found is not None
    text = found.markdown()
    assert column(text, "what") == [
        "the engine, fused 8-bit product and attention, launched",
        "the engine, stock kernels, launched",
        "generate(), one batch",
    ]
    assert column(text, "a step p50, ms") == ["6.40", "–", "–"]
    assert column(text, "of the limit") == ["62 %", "62 %", "62 %"]
    assert "Not run: decode/fp16/32 (CUDA error)." in text


def test_products_that_failed_or_were_not_captured_are_no_figures_or_other_ones() -> None:
    found = gpu.products(on_a_gpu(**{"products/4096x11008/8": made_up_results.PRODUCT}))
    assert found is not None
    assert list(found.titles) == ["matrix", "rows", "FP16", "bitsandbytes, threshold 6", "reading it, INT8 / FP16"]
    assert [list(row) for row in found.rows] == [["4096 x 11008", "8", "10.0", "90.0", "15.0 / 30.0"]]


def test_an_aim_that_was_not_measured_is_met_or_missed() -> None:
    assert gpu.verdict(Run(made_up_results.bench(), FILE)) is None
    aims = [
        {"aim": "quick", "bound": 24.0, "measured": 25.0, "from": "decode/int8/32", "met": True},
        {"aim": "quicker", "bound": 30.0, "measured": 25.0, "from": "decode/int8/32", "met": False},
        {"aim": "small", "bound": None, "measured": None, "from": None, "met": None},
    ]
    found = gpu.verdict(Run({**made_up_results.bench(), "verdict": aims}, FILE))
    assert found is not None
    assert column(found.markdown(), "met") == ["yes", "no", "–"]
    assert column(found.markdown(), "measured") == ["25.0", "25.0", "–"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("latency_ms/p95", None, "article/equal/naive_fp16: latency_ms has no 'p95'"),
        ("tokens_per_second", "fast", "tokens_per_second is 'fast', not a number"),
        ("errors", 1.5, "errors is 1.5, not a whole number"),
        ("memory", 7, "memory is 7, not an object"),
        ("title", "", "title is '', not a text"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named_with_its_file(path: str, value: object, message: str) -> None:
    with pytest.raises(ResultError, match=f"{FILE}.*{message}"):
        article.article(changed(path, value))


def test_stolen_time_goes_unsaid_or_is_said_where_there_was_none() -> None:
    content = made_up_results.bench()
    measured = cast("dict[str, dict[str, object]]", content["measurements"])

    def said() -> list[str]:
        found = article.article(Run(content, FILE))
        assert found is not None
        return [note for note in found.notes if "the host took" in note]

    assert said() == []
    for server in made_up_results.OURS:
        measured[f"article/equal/{server}"]["stolen_share"] = 0.08 if server == "batched_int8" else 0.001
    assert said() == ["Meanwhile the host took 1.4 % of the processors' time; at most 8.0 %, from batched INT8."]
    measured["article/equal/batched_int8"]["stolen_share"] = 0.004
    assert said() == []
