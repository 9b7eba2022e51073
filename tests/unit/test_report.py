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

from perf.report import tables
from perf.report.__main__ import COMMANDS, DIFFERENT, FAILED, PLOTS, SAME, TABLES, report
from perf.report.results import RESULTS, Result, parse
from perf.report.text import Table, figure, percent, terminal

FILE = "perf/results/made_up.json"
NAIVE = "article/equal/naive_fp16"
Make = Callable[[Result], Table]


def committed(kind: str = "bench") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{kind}.json").read_text())
    return content


def every(**fields: object) -> dict[str, Any]:
    """The committed bench results with fields of every measurement changed."""
    content = committed()
    for one in content["measurements"].values():
        one.update(fields)
    return content


def made(make: Make, content: object) -> Table:
    return make(parse(content, FILE))


def cells(make: Make, content: object, title: str) -> list[str]:
    """Return the cells of a table's column."""
    table = made(make, content)
    return [row[list(table.titles).index(title)] for row in table.rows]


def gpu() -> dict[str, Any]:
    """A gpu.json, which perf/results has none of, with a measurement of every kind."""
    wave = {
        "title": "INT8", "rows": 32, "requests_per_second": 25.0, "tokens_per_second": 5000.0,
        "limit": {"tokens_per_second": 8000.0, "fraction": 0.625},
    }  # fmt: skip
    product = {
        "outputs": 4096, "inputs": 11008, "rows": 8, "bandwidth_us": {"int8": 15.0, "fp16": 30.0},
        "ways": {
            "fp16": {"eager_us": 20.0, "graph_us": 10.0},
            "bitsandbytes_6": {"eager_us": 90.0, "graph_us": None},
            "fused": {"failed": "RuntimeError: no"},
        },
    }  # fmt: skip
    content = committed()
    measurements = {
        **{key: one for key, one in content["measurements"].items() if key.startswith("article/")},
        "stock/int8/32": wave,
        "decode/int8/32": {**wave, "steps": "decode steps: fused, launched", "step_ms": {"p50": 6.4}},
        "decode/fp16/32": {"not_run": "CUDA error"},
        "products/4096x11008/8": product,
    }
    settings = {"model": "a made-up Llama", "prompt_tokens": 100, "output_tokens": 200}
    return {**content, "kind": "gpu", "settings": settings, "measurements": measurements}


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
    first = content["measurements"][NAIVE]["latency_ms"]
    found = cells(tables.article, content, f"latency p50 / p95 / {last}, s")[0]
    assert found == " / ".join(figure(first[name] / 1e3) for name in ("p50", "p95", last))


def test_without_naive_fp32_the_baseline_is_naive_fp16_and_without_both_there_is_none() -> None:
    content = committed()
    del content["measurements"]["article/equal/naive_fp32"]
    assert cells(tables.article, content, "over naive FP16")[0] == "1.00 ×"
    del content["measurements"][NAIVE]
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


def test_code_that_was_not_committed_or_changed_during_the_run_is_named_with_the_commit() -> None:
    content = committed()
    content["machine"].update(uncommitted_changes=True, changed_during_run=True)
    assert "` with uncommitted changes, and changed during the run; Python" in parse(content, FILE).origin()


def test_errors_stand_beside_the_servers_name_and_without_any_answer_it_has_no_row() -> None:
    content = committed()
    content["measurements"][NAIVE]["errors"] = 64
    assert made(tables.article, content).rows[0][0] == "naive FP16 (64 errors)"
    del content["measurements"][NAIVE]["latency_ms"]
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


@pytest.mark.parametrize(("most", "expected"), [(0.004, []), (0.08, ["at most 8.0 %, with batched INT8."])])
def test_steal_time_is_mentioned_only_where_it_is_considerable(most: float, expected: list[str]) -> None:
    content = every(stolen_share=0.001)
    content["measurements"]["article/equal/batched_int8"]["stolen_share"] = most
    notes = made(tables.article, content).notes
    assert [note.split("mean; ")[1] for note in notes if note.startswith("Steal time")] == expected


def test_a_server_without_a_figure_for_some_users_has_a_dash_there() -> None:
    content = committed()
    name = tables.label(content["measurements"].pop("users/uniform/1/vllm"))
    assert [row[1] for row in made(tables.by_users, content).rows if row[0] == name] == ["–"]


def test_gpu_tables_distinguish_kernels_and_what_failed_was_not_captured_or_not_measured() -> None:
    decoding = made(tables.gpu_decoding, gpu())
    assert [(row[0], row[5], row[-1]) for row in decoding.rows] == [
        ("the engine, fused, launched", "6.40", "62 %"),
        ("generate(), one batch", "–", "62 %"),
    ]
    assert "Not run: decode/fp16/32 (CUDA error)." in decoding.notes
    products = made(tables.gpu_products, gpu())
    assert list(products.titles) == ["matrix", "rows", "FP16", "bitsandbytes, threshold 6", "reading it, INT8 / FP16"]
    assert [list(row) for row in products.rows] == [["4096 x 11008", "8", "10.0", "90.0", "15.0 / 30.0"]]


def test_a_terminal_s_columns_are_aligned_under_wrapped_titles() -> None:
    table = Table(["name", "a long title", "b"], [False, True, True], [["a row", "1.23", "4.56"]], ["a note"])
    assert terminal(table).splitlines() == [
        "name       a     b",
        "        long      ",
        "       title      ",
        "-----  -----  ----",
        "a row   1.23  4.56",
        "",
        "a note",
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

    def report(self, check: bool = False) -> int:
        return report([self.document], self.results, self.plots, check)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Without the bench's results: its five plots take most of the time."""
    return Folder(tmp_path, "quality", "tune")


def test_every_block_is_filled_the_rest_stays_and_the_same_results_make_the_same_bytes(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "bench", "bench-avx2", "sweep", "quality", "tune", "stops")
    (folder.results / "gpu.json").write_text(json.dumps(gpu()))
    assert folder.report() == SAME
    text = folder.document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nA `<!-- table: NAME -->` in a sentence is text.\n")
    assert "Not measured yet" not in text
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


def test_the_check_passes_after_a_report_and_names_what_differs(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [folder.report(check=True), folder.report(), folder.report(check=True)] == [DIFFERENT, SAME, SAME]
    plot = folder.plots / "pareto.svg"
    plot.unlink()
    folder.document.write_text(folder.document.read_text().replace("| perplexity", "| perplexitty"))
    capsys.readouterr()
    assert folder.report(check=True) == DIFFERENT
    said = [f"{file} differs from the results: run python -m perf.report" for file in (plot, folder.document)]
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize("names", [[], sorted(COMMANDS)], ids=["no", "empty"])
def test_without_results_or_measurements_each_block_names_its_command(tmp_path: Path, names: list[str]) -> None:
    folder = Folder(tmp_path)
    for name in names:
        empty = {**committed(), "kind": name, "measurements": {}, "overhead": None}
        (folder.results / f"{name}.json").write_text(json.dumps(empty))
    assert folder.report() == SAME
    text = folder.document.read_text()
    assert text.count("*Not measured yet") == len(TABLES) + len(PLOTS)
    assert "`make tune SLO_P95_MS=<milliseconds>`" in text
    assert not folder.plots.exists()


UNREADABLE = {
    "no end": ("<!-- table: a -->", "{}", "x.md, line 1: found <!-- table: a --> and then the end of the document"),
    "no beginning": ("\n<!-- end: a -->", "{}", "x.md, line 2: found <!-- end: a --> and then the end of the"),
    "another end": ("<!-- table: a -->\n<!-- end: b -->", "{}", "x.md, line 1: found <!-- table: a --> and then"),
    "unknown": ("<!-- table: artcle -->\n<!-- end: artcle -->", "{}", "x.md: there is no table 'artcle'; there are "),
    "not JSON": ("", '{"kind": "bench"', "sweep.json is not JSON"),
    "no machine": ("", '{"kind": "bench"}', "sweep.json has no head of a result: KeyError('machine')"),
    "a list": ("", "[]", "sweep.json has no head of a result: TypeError"),
    "no latency": (
        "",
        (RESULTS / "sweep.json").read_text().replace('"latency_ms"', '"latencies"'),
        "sweep.json lacks a field or has one of another form: KeyError('latency_ms')",
    ),
}
"""A document, sweep.json, and the error."""


@pytest.mark.parametrize(("document", "result", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_file_is_one_line_and_changes_nothing(
    folder: Folder, capsys: pytest.CaptureFixture[str], document: str, result: str, message: str
) -> None:
    folder.document.write_text(document)
    (folder.results / "sweep.json").write_text(result)
    assert folder.report() == FAILED
    error = capsys.readouterr().err
    assert error.startswith(f"report: {message}")
    assert error.count("\n") == 1
    assert folder.document.read_text() == document
    assert not folder.plots.exists()
