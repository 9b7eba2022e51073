"""`python -m perf.report`: tables and plots of the committed results, and the check that documents are current.

tests/contract compares every table and plot of the documents with the committed results. Here is what those don't have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from unit import made_up_results

from perf.report import tables
from perf.report.__main__ import DIFFERENT, FAILED, PLOTS, SAME, TABLES, main
from perf.report.results import RESULTS, Result, ResultError, parse
from perf.report.text import Table, figure, percent, terminal

FILE = "perf/results/made_up.json"
Make = Callable[[Result], Table | None]


def committed(kind: str = "bench") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{kind}.json").read_text())
    return content


def made(make: Make, content: object) -> Table:
    found = make(parse(content, FILE))
    assert found is not None
    return found


def cells(make: Make, content: object, title: str) -> list[str]:
    """Return the cells of a table's column."""
    table = made(make, content)
    return [row[list(table.titles).index(title)] for row in table.rows]


def every(**fields: object) -> dict[str, Any]:
    """The committed bench results with fields of every measurement changed."""
    content = committed()
    for one in content["measurements"].values():
        one.update(fields)
    return content


def changed(path: str, value: object, key: str = "article/equal/naive_fp16") -> dict[str, Any]:
    """The committed bench results with one field of a measurement changed, or removed if the value is None."""
    content = committed()
    fields = content["measurements"][key]
    *parents, last = path.split("/")
    for parent in parents:
        fields = fields[parent]
    if value is None:
        del fields[last]
    else:
        fields[last] = value
    return content


def with_more_users() -> dict[str, Any]:
    """The committed bench results, where every server has also been measured with one user and with a larger model."""
    content = committed()
    measured = content["measurements"]
    measured = {key: one for key, one in measured.items() if key.split("/")[0] not in ("users", "large")}
    for key, one in [*measured.items()]:
        if key.startswith("peers/closed/uniform/") and "not_run" not in one:
            alone = {
                **one,
                "load": {**one["load"], "concurrency": 1},
                "tokens_per_second": one["tokens_per_second"] / 8,
            }
            measured[f"users/uniform/1/{one['server']}"] = alone
            measured[f"large/1/{one['server']}"] = {**alone, "model": "a larger Llama"}
    return {**content, "measurements": measured}


@pytest.mark.parametrize(
    ("shown", "value", "text"),
    [
        *[(figure, value, text) for value, text in ((0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"))],
        *[(figure, value, text) for value, text in ((123.4, "123"), (1234.5, "1,234"), (-2.5, "-2.50"))],
        *[(percent, share, text) for share, text in ((0, "0 %"), (0.0512, "5.1 %"), (0.264, "26 %"))],
        *[(percent, share, text) for share, text in ((0.987, "98.7 %"), (0.9996, "99.96 %"), (1, "100 %"))],
    ],
)
def test_figures_have_three_digits_and_a_share_below_one_is_never_100_percent(
    shown: Callable[[float], str], value: float, text: str
) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(("requests", "last"), [(99, "max"), (100, "p99")])
def test_with_a_hundred_requests_the_table_has_a_99th_percentile(requests: int, last: str) -> None:
    content = every(requests=requests, errors=0)
    first = content["measurements"]["article/equal/naive_fp16"]["latency_ms"]
    found = cells(tables.article, content, f"latency p50 / p95 / {last}, s")[0]
    assert found == " / ".join(figure(first[name] / 1e3) for name in ("p50", "p95", last))


def test_without_naive_fp32_the_baseline_is_naive_fp16_and_without_both_there_is_none() -> None:
    content = committed()
    del content["measurements"]["article/equal/naive_fp32"]
    assert cells(tables.article, content, "over naive FP16")[0] == "1.00 ×"
    del content["measurements"]["article/equal/naive_fp16"]
    assert not any(title.startswith("over") for title in made(tables.article, content).titles)


@pytest.mark.parametrize(
    ("content", "slow"),
    [
        (committed(), True),
        (every(weights="FP32"), False),
        (committed() | {"rates": {**committed()["rates"], "operations": {"fp32": 1e13, "fp16": 1e14}}}, False),
    ],
    ids=["measured and slower", "not measured", "faster"],
)
def test_fp16_is_called_slow_only_where_it_is_measured_and_slower_than_fp32(
    content: dict[str, Any], slow: bool
) -> None:
    assert any("slower" in note for note in made(tables.article, content).notes) is slow


def test_vram_is_named_as_the_devices_and_not_the_processes() -> None:
    content = every(memory={"kind": "VRAM", "weights_mib": 33.4, "process_mib": 1234.5})
    assert set(cells(tables.article, content, "VRAM in use on the device, MiB")) == {"1,234"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"uncommitted_changes": False, "changed_during_run": None}, "`;"),
        ({"uncommitted_changes": True, "changed_during_run": None}, "` with uncommitted changes;"),
        (
            {"uncommitted_changes": True, "changed_during_run": True},
            "` with uncommitted changes, and changed during the run;",
        ),
    ],
)
def test_the_origin_names_device_versions_command_and_uncommitted_changes(
    flags: dict[str, object], expected: str
) -> None:
    content: dict[str, Any] = made_up_results.result("bench", "make bench", {})
    content["machine"].update(flags)
    assert parse(content, FILE).origin.line() == (
        f"CPU: Made-up 9000, 2 cores (no GPU), 1 thread per server; a made-up Llama; 2001-01-01; commit "
        f"`0123456{expected} Python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0. "
        "`make bench` writes `perf/results/made_up.json`."
    )


def test_errors_stand_beside_the_servers_name_and_without_any_answer_it_has_no_row() -> None:
    assert made(tables.article, changed("errors", 3)).rows[0][0] == "naive FP16 (3 errors)"
    content = changed("latency_ms", None)
    content["measurements"]["article/equal/naive_fp16"]["errors"] = 64
    table = made(tables.article, content)
    assert not any(row[0].startswith("naive FP16") for row in table.rows)
    assert any("naive FP16 (all 64 requests failed)" in note for note in table.notes)


def test_a_server_that_did_not_run_is_named_once_with_its_reason() -> None:
    content = committed()
    for one in content["measurements"].values():
        if one["server"] == "vllm":
            one["not_run"] = "no wheel"
    table = made(tables.peers_closed, content)
    assert "vLLM" not in {row[1] for row in table.rows}
    assert sum(note.count("vLLM (no wheel)") for note in table.notes if note.startswith("Not run: ")) == 1


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0.004, []), (0.08, ["at most 8.0 %, with batched INT8."])],
)
def test_steal_time_is_mentioned_only_where_it_is_considerable(most: float, expected: list[str]) -> None:
    content = every(stolen_share=0.001)
    content["measurements"]["article/equal/batched_int8"]["stolen_share"] = most
    notes = made(tables.article, content).notes
    assert [note.split("mean; ")[1] for note in notes if note.startswith("Steal time")] == expected


def test_servers_stand_by_falling_tokens_per_second_with_a_column_for_each_number_of_users() -> None:
    content = with_more_users()
    table = made(tables.headline, content)
    assert list(table.titles) == ["tokens/s", "1 user", "32 users"]
    rates = [float(rate.replace(",", "")) for rate in cells(tables.headline, content, "32 users")]
    assert rates == sorted(rates, reverse=True)
    both = made(tables.by_users, content)
    titles = ["1 user, uniform", "32 users, uniform", "32 users, geometric"]
    assert list(both.titles) == ["tokens/s", *titles], "a column without a measurement is left out"
    assert [row[:1] for row in both.rows] == [row[:1] for row in table.rows]
    assert [row[1:3] for row in both.rows] == [row[1:] for row in table.rows]


def test_the_larger_model_is_named_beneath_its_table_and_how_int8_is_computed_too() -> None:
    content = with_more_users()
    (one,) = (one for key, one in content["measurements"].items() if key.endswith("large/1/triton_llama_int8"))
    one["settings"] = {"decode_steps": "exact INT8, two terms, launched"}
    notes = made(tables.large, content).notes
    assert notes[0].startswith("a larger Llama; new tokens: uniform, mean 200; closed loop")
    assert "Decode steps, triton-llama INT8: exact INT8, two terms, launched." in notes
    one["settings"] = {"decode_steps": "on the CPU, launched"}
    assert not [note for note in made(tables.large, content).notes if note.startswith("Decode steps")]


def test_the_overhead_s_notes_have_the_share_of_a_step_beyond_its_passes_and_its_share_of_the_limit() -> None:
    content = committed()
    steps = {
        "rows": 32,
        "step_ms": 12.5,
        "passes_ms": 11.0,
        "rest_share": 0.12,
        "limit_ms": 6.25,
        "share_of_limit": 0.5,
    }
    content["overhead"]["steps"] = steps
    note = made(tables.overhead, content).notes[1]
    assert note.startswith(
        "A decode step of 32 rows in the bare engine takes 12.5 ms, of which 11.0 ms are the model's"
    )
    assert "passes and 12 % are sampling, texts and rows" in note
    assert note.endswith("takes 6.25 ms: 50 % of that limit are reached.")


def test_int8_s_distance_from_its_own_weights_has_a_column_where_it_was_measured() -> None:
    content = committed("quality")
    for one in content["measurements"].values():
        one.pop("kl_from_weights_only_nats", None)
    title = "KL from weights only, head too"
    assert title not in made(tables.quality, content).titles
    content["measurements"]["int8_threshold_0"]["kl_from_weights_only_nats"] = {"mean": 1.5e-8, "p99": 0.0}
    assert "1.50e-08 / 0" in cells(tables.quality, content, title)


@pytest.mark.parametrize(
    "make",
    [getattr(tables, name) for name in ("article", "mixed", "sweep", "peers_closed", "peers_poisson", "overhead")]
    + [tables.headline, tables.by_users, tables.large]
    + [tables.gpu_verdict, tables.gpu_decoding, tables.gpu_products],
)
def test_a_table_without_measurements_is_none(make: Make) -> None:
    assert make(parse({**committed(), "measurements": {}, "overhead": None}, FILE)) is None


def test_gpu_tables_distinguish_kernels_and_what_failed_was_not_captured_or_not_measured() -> None:
    measurements = {
        "stock/int8/32": made_up_results.WAVE,
        "stock_engine/int8/32": {**made_up_results.WAVE, "steps": "decode steps: stock kernels, launched"},
        "decode/fp16/32": {"not_run": "CUDA error"},
    }
    decoding = made(tables.gpu_decoding, made_up_results.gpu(**measurements))
    assert [(row[0], row[5], row[-2]) for row in decoding.rows] == [
        ("the engine, fused 8-bit product and attention, launched", "6.40", "62 %"),
        ("the engine, stock kernels, launched", "–", "62 %"),
        ("generate(), one batch", "–", "62 %"),
    ]
    assert "Not run: decode/fp16/32 (CUDA error)." in decoding.notes
    products = made(tables.gpu_products, made_up_results.gpu())
    assert list(products.titles) == ["matrix", "rows", "FP16", "bitsandbytes, threshold 6", "reading it, INT8 / FP16"]
    assert [list(row) for row in products.rows] == [["4096 x 11008", "8", "10.0", "90.0", "15.0 / 30.0"]]
    verdict = made(tables.gpu_verdict, made_up_results.gpu())
    assert [" ".join(row[2:]) for row in verdict.rows] == ["25.0 yes decode/int8/32", "25.0 no decode/int8/32", "– – –"]


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
        parse(changed(path, value), FILE).measured("article")


def test_the_summary_in_a_terminal_has_all_tables_and_no_line_over_120_characters() -> None:
    text = tables.summary(parse(committed(), FILE))
    assert max(map(len, text.splitlines())) <= 120
    for title in ("The article's setting", "at mixed lengths", "closed loop", "Poisson"):
        assert title in text


def test_a_table_that_is_wider_than_the_terminal_continues_in_a_block_that_repeats_the_rows_names() -> None:
    table = Table(["name", "a long title", "b"], [False, True, True], [["a row", "1.23", "4.56"]], ["a `note`"])
    assert terminal(table) == (
        "name       a     b\n        long\n       title\n-----  -----  ----\na row   1.23  4.56\n\na note"
    )
    assert terminal(table, 14).split("\n\n")[:2] == [
        "name       a\n        long\n       title\n-----  -----\na row   1.23",
        "name      b\n-----  ----\na row  4.56",
    ]


class Folder:
    """A folder with results and a document that has a block for every table and plot."""

    def __init__(self, path: Path, *kinds: str) -> None:
        self.results, self.plots, self.document = path / "results", path / "plots", path / "docs" / "x.md"
        self.results.mkdir()
        self.document.parent.mkdir()
        for kind in kinds:
            shutil.copy(RESULTS / f"{kind}.json", self.results)
        names = [("table", name) for name in TABLES] + [("plot", name) for name in PLOTS]
        due = "\n\n".join(f"<!-- {kind}: {name} -->\n<!-- end: {name} -->" for kind, name in names)
        self.document.write_text(f"before\n\n{due}\n\nA `<!-- table: NAME -->` in a sentence is text.\n")

    def report(self, *arguments: str) -> int:
        return main([str(self.document), "--results", str(self.results), "--plots", str(self.plots), *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Without the bench's results: its five plots take most of the time."""
    return Folder(tmp_path, "quality", "tune")


def test_every_block_is_filled_the_rest_stays_and_the_same_results_make_the_same_bytes(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "bench", "sweep", "quality", "tune")
    articles = {key: one for key, one in committed()["measurements"].items() if key.startswith("article/")}
    (folder.results / "bench.json").write_text(json.dumps(with_more_users()))
    (folder.results / "gpu.json").write_text(json.dumps(made_up_results.gpu(**articles)))
    (folder.results / "stops.json").write_text(json.dumps(made_up_results.stops()))
    assert folder.report() == SAME
    text = folder.document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nA `<!-- table: NAME -->` in a sentence is text.\n")
    assert "Not measured yet" not in text
    assert text.count("| 32 running | not run | **failed**: 31 of 33, 2 lost; code 0; 9.0 s |") == 2
    assert "](../plots/scaling.svg)" in text
    assert {file.stem for file in folder.plots.iterdir()} == set(PLOTS)
    first = {file: file.read_bytes() for file in (folder.document, *folder.plots.iterdir())}
    for file in folder.plots.iterdir():
        drawn = file.read_text()
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
        # Letters are outlines; matplotlib leaves the texts in comments.
        assert f"{committed()['machine']['device']}, " in drawn
        assert str(Path.home()) not in drawn
        assert "dc:date" not in drawn
        file.unlink()
    folder.document.write_text(text.replace("| in-flight", "| in-flihgt"))
    assert folder.report() == SAME
    assert {file: file.read_bytes() for file in (folder.document, *folder.plots.iterdir())} == first


@pytest.mark.parametrize("damaged", ["table 'quality'", "plot 'pareto'"])
def test_the_check_passes_after_a_report_and_names_what_differs(
    damaged: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [folder.report("--check"), folder.report(), folder.report("--check")] == [DIFFERENT, SAME, SAME]
    if damaged == "plot 'pareto'":
        file, state = folder.plots / "pareto.svg", "does not exist"
        file.unlink()
    else:
        file, state = folder.document, "differs from the results"
        file.write_text(file.read_text().replace("| perplexity", "| perplexitty"))
    capsys.readouterr()
    assert folder.report("--check") == DIFFERENT
    assert capsys.readouterr().err == f"{file}: {damaged} {state}: run python -m perf.report\n"


def test_without_results_each_block_names_its_command_and_the_check_names_a_plot_that_is_there(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.results.iterdir():
        file.unlink()
    assert folder.report() == SAME
    text = folder.document.read_text()
    assert text.count("*Not measured yet") == len(TABLES) + len(PLOTS)
    assert "`make tune SLO_P95_MS=<milliseconds>`" in text
    assert not folder.plots.exists()
    assert folder.report("--check") == SAME
    folder.plots.mkdir()
    (folder.plots / "scaling.svg").write_text("<svg/>")
    folder.report()
    assert "scaling.svg: skipped, not measured" in capsys.readouterr().out
    assert folder.report("--check") == DIFFERENT
    assert "plot 'scaling' exists although its results don't: delete it" in capsys.readouterr().err


UNREADABLE = {
    "no end": ("<!-- table: a -->", "{}", "x.md, line 1: found <!-- table: a --> and then the end of the document"),
    "no beginning": ("\n<!-- end: a -->", "{}", "x.md, line 2: found <!-- end: a --> and then the end of the"),
    "another end": ("<!-- table: a -->\n<!-- end: b -->", "{}", "x.md, line 1: found <!-- table: a --> and then"),
    "two beginnings": ("<!-- table: a -->\n<!-- plot: b -->", "{}", "x.md, line 1: found <!-- table: a --> and then"),
    "unknown": ("<!-- table: artcle -->\n<!-- end: artcle -->", "{}", "x.md: there is no table 'artcle'; there are "),
    "not JSON": ("", '{"kind": "bench"', "other.json is not JSON"),
    "no date": ("", '{"kind": "bench"}', "other.json: date: Field required"),
    "a list": ("", "[]", "other.json: Input should be an object, found []"),
    "one kind twice": ("", (RESULTS / "tune.json").read_text(), "other.json and tune.json are both of kind 'tune'"),
}
"""A document, a result beside the others, and the error."""


@pytest.mark.parametrize(("document", "result", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_file_is_one_line_and_changes_nothing(
    folder: Folder, capsys: pytest.CaptureFixture[str], document: str, result: str, message: str
) -> None:
    folder.document.write_text(document)
    (folder.results / "other.json").write_text(result)
    assert folder.report() == FAILED
    error = capsys.readouterr().err
    assert error.startswith(f"report: {message}")
    assert error.count("\n") == 1
    assert folder.document.read_text() == document
    assert not folder.plots.exists()
