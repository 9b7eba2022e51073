"""`make report`: numbers, tables of results, and the page they stand in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from perf import report
from perf.report import PAGE, Result, article, figure, filled, markdown, read, summary
from perf.results_file import RESULTS

NAIVE = "article/equal/naive_fp16"


def changed(**fields: object) -> Result:
    """Return the committed result with changed fields in a measurement; None removes it."""
    result = read(RESULTS / "bench.json")
    content: dict[str, Any] = copy.deepcopy(dict(result.content))
    entry = {**content["measurements"][NAIVE], **fields}
    content["measurements"][NAIVE] = {name: value for name, value in entry.items() if value is not None}
    return Result("x.json", content)


def table(result: Result) -> str:
    return markdown(result, "article", article)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (123.4, "123"), (1234.5, "1,234"), (-2.5, "-2.50")],
)
def test_figures_have_three_significant_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_failed_requests_are_a_note() -> None:
    assert "- Failed requests, naive FP16: 64." in table(changed(errors=64))


def test_a_measurement_that_did_not_run_has_its_reason_and_no_row() -> None:
    text = table(changed(not_run="no time left"))
    assert "- Not run, naive FP16: no time left." in text
    assert "| naive FP16" not in text


def test_the_speed_up_is_over_naive_fp32() -> None:
    (line,) = [line for line in table(changed()).splitlines() if line.startswith("| in-flight INT8")]
    rows = read(RESULTS / "bench.json").content["measurements"]
    ratio = (
        rows["article/equal/inflight_int8"]["tokens_per_second"] / rows["article/equal/naive_fp32"]["tokens_per_second"]
    )
    assert f"| {ratio:.1f} × |" in line


def test_the_run_ends_with_every_table_it_measured() -> None:
    assert summary(changed()).count("writes `x.json`.") == 3


def test_a_table_without_a_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert filled(PAGE.read_text()).count("\nNot measured yet.\n") == len(report.TABLES)


def test_the_committed_page_is_current() -> None:
    assert filled(PAGE.read_text()) == PAGE.read_text()
