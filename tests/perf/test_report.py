"""`python -m perf.report`: tables of results, and the check that pages are current."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from perf.report import tables
from perf.report.__main__ import DIFFERENT, FAILED, PLOTS, SAME, TABLES, report
from perf.report.results import RESULTS, parse
from perf.report.text import Table, figure, percent, terminal

NAIVE = "article/equal/naive_fp16"


def committed() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / "bench.json").read_text())
    return content


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
def test_figures_have_three_significant_digits(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.0512, "5.1 %"), (0.264, "26 %"), (0.9996, "99.96 %"), (1, "100 %")]
)
def test_a_share_below_one_is_never_shown_as_100_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_errors_stand_beside_the_name_of_the_server() -> None:
    content = committed()
    content["measurements"][NAIVE]["errors"] = 64
    assert tables.article(parse(content, "x.json")).rows[0][0] == "naive FP16 (64 errors)"


def test_a_server_without_an_answer_has_no_row() -> None:
    content = committed()
    content["measurements"][NAIVE]["errors"] = 64
    del content["measurements"][NAIVE]["latency_ms"]
    table = tables.article(parse(content, "x.json"))
    assert not any(row[0].startswith("naive FP16") for row in table.rows)
    assert any("naive FP16 (all 64 requests failed)" in note for note in table.notes)


def test_a_server_that_did_not_run_is_named_with_its_reason() -> None:
    content = committed()
    content["measurements"][NAIVE]["not_run"] = "no wheel"
    notes = tables.article(parse(content, "x.json")).notes
    assert any(note.startswith("Not run: naive FP16 (no wheel)") for note in notes)


def test_code_that_changed_during_the_run_is_named_with_the_commit() -> None:
    content = committed()
    content["machine"].update(uncommitted_changes=True, changed_during_run=True)
    assert "` with uncommitted changes, and changed during the run; Python" in parse(content, "x.json").origin()


def test_a_terminal_table_is_aligned_under_wrapped_titles() -> None:
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


@pytest.fixture
def page(tmp_path: Path) -> Path:
    names = [("table", name) for name in TABLES] + [("plot", name) for name in PLOTS]
    blocks = "\n\n".join(f"<!-- {kind}: {name} -->\n<!-- end: {name} -->" for kind, name in names)
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{blocks}\n\nA `<!-- table: NAME -->` in a sentence is text.\n")
    return page


def test_a_report_fills_every_block(page: Path, tmp_path: Path) -> None:
    assert report([page], RESULTS, tmp_path / "plots", check=False) == SAME
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("in a sentence is text.\n")
    assert "Not measured yet" not in text
    assert report([page], RESULTS, tmp_path / "plots", check=True) == SAME


def test_the_check_names_a_page_that_differs(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([page], RESULTS, tmp_path / "plots", check=True) == DIFFERENT
    assert f"{page} differs from the results: run python -m perf.report" in capsys.readouterr().err


def test_a_block_without_a_result_names_its_command(page: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    assert report([page], tmp_path / "results", tmp_path / "plots", check=False) == SAME
    assert page.read_text().count("*Not measured yet") == len(TABLES) + len(PLOTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: article -->", "page.md, line 1: found <!-- table: article --> and then the end of the document"),
        ("<!-- table: artcle -->\n<!-- end: artcle -->", "page.md: there is no table 'artcle'"),
    ],
)
def test_a_malformed_block_is_one_line_of_error(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    page.write_text(text)
    assert report([page], RESULTS, tmp_path / "plots", check=False) == FAILED
    assert message in capsys.readouterr().err
    assert page.read_text() == text


def test_an_unreadable_result_is_one_line_of_error(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    (tmp_path / "results" / "bench.json").write_text('{"kind": "bench"')
    assert report([page], tmp_path / "results", tmp_path / "plots", check=False) == FAILED
    assert "bench.json is not JSON" in capsys.readouterr().err
