"""A run's result file: complete or partial, resumable, with the state of the code; its report runs without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perf import environment
from perf.environment import ROOT
from perf.results_file import Results


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@invalid", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own, independent of edits to this one."""
    folder = tmp_path / "repository"
    (folder / "perf" / "results").mkdir(parents=True)
    (folder / "docs").mkdir()
    for name in ("code.py", "README.md", "docs/benchmarks.md"):
        (folder / name).write_text("before\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "all")
    monkeypatch.setattr(environment, "ROOT", folder)
    return folder


def run(repository: Path, *, resume: bool = False, settings: object = 1) -> Results:
    output = repository / "perf" / "results" / "made_up.json"
    return Results(output, "made_up", {"setting": settings}, resume, repository.parent / "partial")


def finished(repository: Path, key: str) -> Path:
    results = run(repository)
    results.add(key, {"value": 1})
    results.finish()
    return repository / "perf" / "results" / "made_up.json"


def test_a_run_replaces_the_last_result_only_when_it_is_finished(repository: Path) -> None:
    file = finished(repository, "old")
    before = file.read_bytes()
    results = run(repository)
    results.add("new", {"value": 2})
    assert file.read_bytes() == before
    assert list(load(results.partial)["measurements"]) == ["new"]
    results.finish()
    assert list(load(file)["measurements"]) == ["new"]
    assert list(file.parent.iterdir()) == [file]
    assert list((repository.parent / "partial").iterdir()) == []


def test_an_interrupted_run_is_resumed_before_a_finished_one(repository: Path) -> None:
    finished(repository, "old")
    assert run(repository, resume=True).measurements.get("old")
    run(repository).add("new", {"value": 2})
    resumed = run(repository, resume=True)
    assert resumed.measurements.get("new")
    assert not resumed.measurements.get("old")
    assert not run(repository).measurements.get("new")


def test_results_of_one_name_in_two_folders_have_two_partial_files(repository: Path) -> None:
    other = Results(repository / "made_up.json", "made_up", {}, False, repository.parent / "partial")
    assert other.partial != run(repository).partial


def test_a_run_under_another_setting_or_commit_is_not_resumed(repository: Path) -> None:
    finished(repository, "old")
    with pytest.raises(ValueError, match=r"has other settings \(\{'setting': 1\}\); resume with those, or start anew"):
        run(repository, resume=True, settings=2)
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "more")
    with pytest.raises(ValueError, match="was measured on commit"):
        run(repository, resume=True)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"kind": "made_up", "settings": {"setting": 1}, "machine": {}}'])
def test_a_file_that_is_no_result_is_not_resumed(repository: Path, content: str) -> None:
    (repository / "perf" / "results" / "made_up.json").write_text(content)
    with pytest.raises(ValueError, match=r"made_up\.json can't be resumed, it isn't a result's file"):
        run(repository, resume=True)


def test_documents_and_results_do_not_count_as_changes(repository: Path) -> None:
    for name in ("README.md", "docs/benchmarks.md", "docs/new.svg", "perf/results/new.json"):
        (repository / name).write_text("after\n")
    assert environment.describe()["uncommitted_changes"] is False


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_a_result_reports_code_that_changed_during_the_run(repository: Path, name: str) -> None:
    assert "changed_during_run" not in load(finished(repository, "one"))["machine"]
    results = run(repository)
    (repository / name).write_text("at the end\n")
    results.finish()
    assert load(repository / "perf" / "results" / "made_up.json")["machine"]["changed_during_run"] is True


def test_the_report_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, perf.report.__main__; print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
