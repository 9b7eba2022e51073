"""The tables of the report: their cells and notes, from made-up results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from unit import made_up_results

from perf.report import tables
from perf.report.results import Result, ResultError, parse
from perf.report.text import Table, figure, percent, terminal

FILE = "perf/results/made_up.json"
Make = Callable[[Result], Table | None]


def column(markdown: str, title: str) -> list[str]:
    """Return the cells of a Markdown table's column."""
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row[titles.index(title)] for row in rows]


def made(make: Make, content: made_up_results.Content) -> Table:
    found = make(parse(content, FILE))
    assert found is not None
    return found


def cells(make: Make, content: made_up_results.Content, title: str) -> list[str]:
    return column(made(make, content).markdown(), title)


def changed(path: str, value: object, key: str = "article/equal/naive_fp16") -> made_up_results.Content:
    """The bench results with one field of a measurement changed, or removed if the value is None."""
    content = made_up_results.bench()
    fields = cast("dict[str, Any]", content["measurements"])[key]
    *parents, last = path.split("/")
    for parent in parents:
        fields = fields[parent]
    if value is None:
        del fields[last]
    else:
        fields[last] = value
    return content


def every(content: made_up_results.Content) -> list[dict[str, Any]]:
    return list(cast("dict[str, Any]", content["measurements"]).values())


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
def test_figures_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.0512, "5.1 %"), (0.264, "26 %"), (0.987, "98.7 %"), (0.9996, "99.96 %"), (1, "100 %")],
)
def test_a_share_below_one_is_never_shown_as_100_percent(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("make", "title", "expected"),
    [
        (tables.article, "server", [title for title, *_ in made_up_results.OURS.values()]),
        (tables.article, "memory of the processes (PSS), MiB", ["1,234"] * 6),
        (tables.article, "requests", ["64"] * 6),
        (tables.article, "tokens/s", ["60.0", "100", "260", "240", "620", "700"]),
        (tables.article, "over naive FP32", ["0.600 ×", "1.00 ×", "2.60 ×", "2.40 ×", "6.20 ×", "7.00 ×"]),
        (tables.mixed, "new tokens", ["uniform, mean 200"] * 6 + ["geometric, mean 200"] * 6),
        (tables.peers_closed, "limit, tokens/s", ["4,300"] * 10),
        (tables.peers_closed, "requests", ["64"] * 10),
        (tables.peers_poisson, "sent, requests/s", ["1.50"] * 5),
        (tables.overhead, "tokens/s", ["610", "640", "700", "710"]),
        (tables.overhead, "of the next row's", ["95.3 %", "91.4 %", "98.6 %", "–"]),
        (tables.overhead, "of the last row's", ["86 %", "90.1 %", "98.6 %", "–"]),
    ],
)
def test_columns_show_what_was_measured(make: Make, title: str, expected: list[str]) -> None:
    assert cells(make, made_up_results.bench(), title) == expected


@pytest.mark.parametrize(
    ("make", "title", "row", "expected"),
    [
        (tables.article, "weights, MiB", 3, "INT8, 33.4"),
        (tables.article, "latency p50 / p95 / max, s", 4, "10.3 / 14.5 / 17.5"),
        (tables.article, "rows per step", 0, "0.930"),
        (tables.article, "limit, tokens/s", 4, "5,200"),
        (tables.article, "of the limit", 4, "12 %"),
        (tables.mixed, "over naive FP32", 4, "4.77 ×"),
        (tables.mixed, "over naive FP32", 10, "3.44 ×"),
        (tables.peers_closed, "of the limit", 0, "14 %"),
        (tables.peers_poisson, "first token p50 / p95, ms", 2, "–"),
        (tables.peers_poisson, "within the objective", 0, "97.0 %"),
        (tables.where, "time", 0, "20.0 s of one run"),
        (tables.where, "time", 5, "10.0 s of one request"),
    ],
)
def test_cells_show_what_was_measured(make: Make, title: str, row: int, expected: str) -> None:
    assert cells(make, made_up_results.bench(), title)[row] == expected


def test_with_a_hundred_requests_the_table_has_a_99th_percentile() -> None:
    content = made_up_results.bench()
    for one in every(content):
        one["requests"] = 100
    assert cells(tables.article, content, "latency p50 / p95 / p99, s")[4] == "10.3 / 14.5 / 16.5"


def test_without_naive_fp32_the_baseline_is_naive_fp16_and_without_both_there_is_none() -> None:
    content = made_up_results.bench()
    measurements = cast("dict[str, Any]", content["measurements"])
    del measurements["article/equal/naive_fp32"]
    assert cells(tables.article, content, "over naive FP16") == ["1.00 ×", "4.33 ×", "4.00 ×", "10.3 ×", "11.7 ×"]
    del measurements["article/equal/naive_fp16"]
    assert not any(title.startswith("over") for title in made(tables.article, content).titles)


def test_fp16_is_called_slow_only_where_it_is_measured_and_slower_than_fp32() -> None:
    def slow(content: made_up_results.Content) -> bool:
        return any("slower" in note for note in made(tables.mixed, content).notes)

    assert slow(made_up_results.bench())
    without = made_up_results.bench()
    for one in every(without):
        if one.get("weights") == "FP16":
            one["weights"] = "FP32"
    assert not slow(without)
    fast = made_up_results.bench()
    cast("dict[str, Any]", fast["rates"])["operations"] = {"fp32": 1e13, "fp16": 1e14}
    assert not slow(fast)


def test_vram_is_named_as_the_devices_and_not_the_processes() -> None:
    content = made_up_results.bench()
    for one in every(content):
        if "memory" in one:
            one["memory"]["kind"] = "VRAM"
    assert cells(tables.article, content, "VRAM in use on the device, MiB") == ["1,234"] * 6


def test_the_notes_state_origin_window_limit_and_rates() -> None:
    notes = made(tables.article, made_up_results.bench()).notes
    assert notes[-1] == (
        "CPU: Made-up 9000, 2 cores (no GPU), 1 thread per server; a made-up Llama; 2001-01-01; commit `0123456`; "
        "Python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0, locust 2.47.0. `make bench` writes "
        "`perf/results/made_up.json`."
    )
    assert notes[1] == tables.WINDOW
    assert "bandwidth: naive FP16, naive FP32; operations: batched FP16" in notes[2]
    assert "FP16 products are 7.60 × slower than FP32 on this device" in notes[3]
    assert "10^9 operations/s: FP32 95.0; FP16 12.5." in notes[3]
    assert "reads GB/s 36.0 at 32 MiB; products, 10^9 operations/s: fp32 95.0" in notes[4]


def test_the_notes_of_the_baselines_state_window_objective_and_servers_that_did_not_run() -> None:
    closed, poisson = (made(make, made_up_results.bench()) for make in (tables.peers_closed, tables.peers_poisson))
    assert tables.WINDOW in closed.notes[1]
    assert "over the whole run" in poisson.notes[0]
    assert any(note.startswith("Objective: the first token within 2.00 s and 100 ms") for note in poisson.notes)
    assert "vLLM" not in str(closed.rows)
    assert "Not run: vLLM (no wheel for this made-up machine)." in closed.notes


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({}, ";"), ({"changed_during_run": True}, ", and changed during the run;")],
)
def test_the_origin_states_uncommitted_changes(flags: dict[str, bool], expected: str) -> None:
    content = made_up_results.bench()
    cast("dict[str, object]", content["machine"]).update(flags, uncommitted_changes=True)
    assert f"`0123456` with uncommitted changes{expected}" in parse(content, FILE).origin.line()


def test_errors_stand_beside_the_servers_name_and_without_any_answer_it_has_no_row() -> None:
    assert made(tables.article, changed("errors", 3)).rows[0][0] == "naive FP16 (3 errors)"
    content = changed("latency_ms", None)
    every(content)[0]["errors"] = 64
    table = made(tables.article, content)
    assert len(table.rows) == 5
    assert "Not run: naive FP16 (all 64 requests failed)." in table.notes


def test_the_sweep_has_a_row_per_concurrency() -> None:
    table = made(tables.sweep, made_up_results.sweep())
    assert [row[0] for row in table.rows] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    title = "in-flight INT8, tokens/s / p95 s / of the limit"
    assert column(table.markdown(), title)[5] == "620 / 14.5 / 12 %"
    assert table.notes[1].startswith("64 requests were measured for each figure.")


def test_quality_shows_the_distance_of_each_quantization() -> None:
    text = made(tables.quality, made_up_results.quality()).markdown()
    assert column(text, "perplexity") == ["35.797", "35.811", "35.811"]
    assert column(text, "KL divergence mean / p99, nats") == ["–", "0.000420 / 0.00310", "0.000420 / 0.00310"]
    assert column(text, "same best token")[1] == "98.8 %"


def test_tuning_shows_the_pareto_front_and_the_recommendation() -> None:
    table = made(tables.tune, made_up_results.tune())
    assert column(table.markdown(), "slots") == ["64", "32", "16", "8"]
    assert column(table.markdown(), "") == ["", "recommended", "", ""]
    assert "6 points were measured" in table.notes[0]


def test_the_parts_are_indented_below_their_wholes_and_small_ones_are_counted() -> None:
    table = made(tables.where, made_up_results.bench())
    assert [row[0].strip() for row in table.rows][:3] == ["bare engine", "step", "forward"]
    assert [len(row[0]) - len(row[0].lstrip()) for row in table.rows] == [0, 4, 8, 8, 4, 0, 4]
    assert "less than 1 % each: 1 of 8 parts" in table.notes[0]


SERVING = [tables.article, tables.mixed, tables.sweep, tables.peers_closed, tables.peers_poisson]


@pytest.mark.parametrize("make", [*SERVING, tables.overhead, tables.gpu_verdict])
def test_a_table_without_measurements_is_none(make: Make) -> None:
    assert make(parse({**made_up_results.bench(), "measurements": {}, "overhead": None}, FILE)) is None


def test_gpu_decoding_distinguishes_the_engine_from_generate_and_its_stock_kernels() -> None:
    stock = {**made_up_results.WAVE, "steps": "decode steps: stock kernels, launched"}
    measurements: made_up_results.Content = {
        "decode/int8/32": made_up_results.STEPPED,
        "stock/int8/32": made_up_results.WAVE,
        "stock_engine/int8/32": {**stock, "step_ms": None},
        "decode/fp16/32": {"not_run": "CUDA error"},
        "products/1x1/1": {"not_run": "no time"},
    }
    text = made(tables.gpu_decoding, made_up_results.gpu(measurements)).markdown()
    assert column(text, "what") == [
        "the engine, fused 8-bit product and attention, launched",
        "the engine, stock kernels, launched",
        "generate(), one batch",
    ]
    assert column(text, "step p50, ms") == ["6.40", "–", "–"]
    assert column(text, "of the limit") == ["62 %", "62 %", "62 %"]
    assert "Not run: decode/fp16/32 (CUDA error)." in text


def test_a_product_that_failed_has_no_figure_and_one_without_a_graph_has_its_eager_time() -> None:
    table = made(tables.gpu_products, made_up_results.gpu({"products/4096x11008/8": made_up_results.PRODUCT}))
    assert list(table.titles) == ["matrix", "rows", "FP16", "bitsandbytes, threshold 6", "reading it, INT8 / FP16"]
    assert [list(row) for row in table.rows] == [["4096 x 11008", "8", "10.0", "90.0", "15.0 / 30.0"]]


def test_an_aim_that_was_not_measured_is_neither_met_nor_missed() -> None:
    made_up = [(24.0, 25.0, "decode/int8/32", True), (30.0, 25.0, "decode/int8/32", False), (None, None, None, None)]
    aims = [{"aim": "quick", **dict(zip(("bound", "measured", "from", "met"), one, strict=True))} for one in made_up]
    text = made(tables.gpu_verdict, {**made_up_results.gpu(), "verdict": aims}).markdown()
    assert column(text, "met") == ["yes", "no", "–"]
    assert column(text, "measured") == ["25.0", "25.0", "–"]
    assert column(text, "measured by") == ["decode/int8/32", "decode/int8/32", "–"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("latency_ms/p95", None, "article/equal/naive_fp16: latency_ms: p95: Field required"),
        ("tokens_per_second", "fast", "tokens_per_second: Input should be a valid number, found 'fast'"),
        ("errors", 1.5, "errors: Input should be a valid integer.*found 1.5"),
        ("memory", 7, "memory: Input should be an object, found 7"),
        ("title", "", "title: String should have at least 1 character, found ''"),
    ],
)
def test_a_wrong_field_is_refused_with_its_file_place_and_value(path: str, value: object, message: str) -> None:
    with pytest.raises(ResultError, match=f"{FILE}.*{message}"):
        parse(changed(path, value), FILE)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (None, []),
        (0.004, []),
        (0.08, ["Steal time: 1.4 % of the processors' time in the mean; at most 8.0 %, with batched INT8."]),
    ],
)
def test_steal_time_is_mentioned_only_where_it_is_considerable(most: float | None, expected: list[str]) -> None:
    content = made_up_results.bench()
    for one in every(content):
        if most is not None:
            one["stolen_share"] = most if one["server"] == "batched_int8" else 0.001
    assert [note for note in made(tables.article, content).notes if note.startswith("Steal time")] == expected


def test_the_summary_in_a_terminal_has_all_tables_and_no_line_over_120_characters() -> None:
    text = tables.summary(parse(made_up_results.bench(), FILE))
    assert max(map(len, text.splitlines())) <= 120
    for title in ("The article's setting", "at mixed lengths", "closed loop", "Poisson"):
        assert title in text


def test_a_wide_table_continues_in_a_block_that_repeats_the_rows_names() -> None:
    table = made(tables.article, made_up_results.bench())
    first, second = (line for line in terminal(table).splitlines() if line.startswith("in-flight INT8"))
    again = " ".join(table.rows[4][:2])
    assert [*first.split(), *second.split()[len(again.split()) :]] == " ".join(table.rows[4]).split()


def test_in_a_narrow_terminal_texts_wrap_and_figures_do_not() -> None:
    titles = ["a long title of a column", "figures"]
    table = Table(titles, [False, True], [["words in a cell", "1.23 / 4.56"]], ["a `b`"])
    assert terminal(table, 24) == (
        "a long           figures\ntitle of a\ncolumn\n-----------  -----------\nwords in a   1.23 / 4.56\ncell\n\na b"
    )


def test_an_unbreakable_row_is_left_wide() -> None:
    table = Table(["a", "b"], [False, True], [["unbreakable", "1,234,567"]])
    assert terminal(table, 10).splitlines()[-1] == "unbreakable  1,234,567"
