"""A result says what it was measured on and how, and the pages have its tables (`make report`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from perf import report
from perf.command import make_command
from perf.plot import PICTURE, picture
from perf.report import PAGES, filled
from perf.results_file import Results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "perf" / "results").glob("*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_a_result_says_where_it_comes_from(file: Path) -> None:
    content: dict[str, Any] = json.loads(file.read_text())
    machine = content["machine"]
    assert re.fullmatch(r"[0-9a-f]{40}", machine["commit"])
    assert machine["device"]
    assert {"torch", "transformers", "bitsandbytes"} <= set(machine["versions"])
    assert re.match(r"\d{4}-\d{2}-\d{2}T", content["date"])
    # The make target that makes it again.
    target = content["command"].split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_a_result_has_no_path_of_the_machine_it_was_measured_on(file: Path) -> None:
    # Two names at least, from the root; /v1/… and /v2/… are a server's.
    assert re.findall(r"(?:^|[\s\"'=])/(?!v\d/)[\w.-]+/[\w./-]+", file.read_text()) == []


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "made_up.json", "made_up", {"setting": 1}, "make made_up")


def test_a_run_replaces_the_last_result_only_when_it_finishes(results: Results, tmp_path: Path) -> None:
    file = tmp_path / "made_up.json"
    file.write_text("{}")
    results.add("new", {"value": 2})
    assert file.read_text() == "{}"
    results.finish()
    assert json.loads(file.read_text())["measurements"] == {"new": {"value": 2}}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("setting", "kept"), [(1, ["old", "new"]), (2, ["new"])])
def test_a_merged_run_keeps_measurements_of_the_same_settings(setting: int, kept: list[str], tmp_path: Path) -> None:
    for number, (key, settings) in enumerate([("old", {"setting": 1}), ("new", {"setting": setting})]):
        results = Results(tmp_path / "it.json", "made_up", settings, f"make {number}", merge=True)
        results.add(key, {"value": number})
        results.finish()
    content = json.loads((tmp_path / "it.json").read_text())
    assert list(content["measurements"]) == kept
    runs = [each["run"] for each in content["measurements"].values() if "run" in each]
    assert [content["runs"][run]["command"] for run in runs] == ["make 0"] * (len(kept) - 1)


def test_the_command_has_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--model", "/models/llama", "--only", "article"])
    assert make_command("bench") == "make bench 'BENCH=--model llama --only article'"


def test_a_table_without_a_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    text = "".join(filled(page.read_text()) for page in PAGES)
    assert text.count("\nNot measured yet.\n") == len(report.TABLES)


def test_the_committed_pages_and_picture_are_current() -> None:
    for page in PAGES:
        assert filled(page.read_text()) == page.read_text()
    assert picture() == PICTURE.read_text()
