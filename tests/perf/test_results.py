"""A run's result file, complete or partial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf.command import make_command
from perf.results_file import Results


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


def test_the_command_has_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--model", "/models/llama", "--only", "article"])
    assert make_command("bench") == "make bench 'BENCH=--model llama --only article'"
