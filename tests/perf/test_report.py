"""`make report`: numbers, tables of results, and the page they stand in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from perf import report
from perf.plot import PICTURE, picture
from perf.report import PAGES, article, filled
from perf.results_file import RESULTS, Result, read
from perf.table import markdown

NAIVE = "article/equal/naive_fp16"


def changed(**fields: object) -> Result:
    """Return the committed result with changed fields in a measurement; None removes it."""
    result = read(RESULTS / "bench-article.json")
    content: dict[str, Any] = copy.deepcopy(dict(result.content))
    entry = {**content["measurements"][NAIVE], **fields}
    content["measurements"][NAIVE] = {name: value for name, value in entry.items() if value is not None}
    return Result("x.json", content)


def test_a_measurement_that_did_not_run_has_its_reason_and_no_row() -> None:
    text = markdown(changed(not_run="no time left"), article)
    assert "- Not run, naive FP16: no time left." in text
    assert "| naive FP16" not in text


def test_a_measurement_of_an_earlier_run_has_that_runs_command() -> None:
    result = changed(run="yesterday")
    result.content["runs"]["yesterday"] = {**result.content, "command": "make bench BENCH='--servers naive'"}
    text = markdown(result, article)
    assert "- Of another run, naive FP16: " in text
    assert "`make bench BENCH='--servers naive'`." in text


def test_a_table_without_a_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    text = "".join(filled(page.read_text()) for page in PAGES)
    assert text.count("\nNot measured yet.\n") == len(report.TABLES)


def test_the_committed_pages_and_picture_are_current() -> None:
    for page in PAGES:
        assert filled(page.read_text()) == page.read_text()
    assert picture() == PICTURE.read_text()
