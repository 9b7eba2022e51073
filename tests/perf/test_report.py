"""`make report`: numbers, tables of results, and the page they stand in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from perf import report
from perf.plot import PICTURE, drawn, picture
from perf.report import PAGES, article, filled, speed
from perf.results_file import RESULTS, Result, read
from perf.table import figure, markdown, percent

NAIVE = "article/equal/naive_fp16"


def changed(**fields: object) -> Result:
    """Return the committed result with changed fields in a measurement; None removes it."""
    result = read(RESULTS / "bench-article.json")
    content: dict[str, Any] = copy.deepcopy(dict(result.content))
    entry = {**content["measurements"][NAIVE], **fields}
    content["measurements"][NAIVE] = {name: value for name, value in entry.items() if value is not None}
    return Result("x.json", content)


def table(result: Result) -> str:
    return markdown(result, article)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (123.4, "123"), (1234.5, "1,234"), (-2.5, "-2.50")],
)
def test_figures_have_three_significant_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_a_measurement_that_did_not_run_has_its_reason_and_no_row() -> None:
    text = table(changed(not_run="no time left"))
    assert "- Not run, naive FP16: no time left." in text
    assert "| naive FP16" not in text


def served(server: str, users: int, rate: float, model: str = "SmolLM2-135M-Instruct") -> dict[str, Any]:
    percentiles = {"p50": 10.0 * users, "p95": 20.0 * users}
    return {
        "server": server, "title": server, "weights": "INT8", "model": model, "tokens_per_second": rate,
        "load": {"mix": "uniform", "concurrency": users, "mean_output_tokens": 200.0},
        "time_to_first_token_ms": percentiles, "inter_token_latency_ms": percentiles,
    }  # fmt: skip


def test_a_server_has_its_speed_at_every_number_of_users_and_its_quality() -> None:
    rows = [served("vllm_int8", 1, 50.0), served("vllm_int8", 32, 500.0), served("other", 32, 600.0)]
    content = {**changed().content, "measurements": {str(number): row for number, row in enumerate(rows)}}
    lines = markdown(Result("x.json", content), speed).splitlines()
    quality = read(RESULTS / "quality.json").content["measurements"]["vllm_int8"]
    nats, differs = figure(quality["kl_nats"]["mean"]), percent(1 - quality["top1_agreement"])
    assert f"| vllm_int8 | {nats} | {differs} | 50.0 | 500 |" in lines
    assert "| other | – | – | – | 600 |" in lines
    assert "| vllm_int8 | 10.0 / 20.0 | 320 / 640 | 10.0 | 320 |" in lines


def test_a_measurement_of_an_earlier_run_has_that_runs_command() -> None:
    run = {**changed().content, "command": "make bench BENCH='--servers naive'"}
    assert "- Of another run, naive FP16: " in (text := table(changed(run=run)))
    assert "`make bench BENCH='--servers naive'`." in text


def test_the_plot_has_a_labelled_point_for_each_server_of_known_quality() -> None:
    text = drawn([served("vllm_int8", 32, 500.0), served("other", 32, 600.0), served("vllm_int8", 1, 50.0)])
    assert text.count("<circle") == 1
    assert ">vllm_int8: 500</text>" in text


def test_a_table_without_a_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    text = "".join(filled(page.read_text()) for page in PAGES)
    assert text.count("\nNot measured yet.\n") == len(report.TABLES)


def test_the_committed_pages_and_picture_are_current() -> None:
    for page in PAGES:
        assert filled(page.read_text()) == page.read_text()
    assert picture() == PICTURE.read_text()
