"""A run's file: what was measured is never lost, and what it was measured with is told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from perf import environment
from perf.results import Results, load


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@invalid", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own, so that nobody's edits to this one change what is told."""
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


def test_a_run_that_ends_early_leaves_the_last_result(repository: Path) -> None:
    file = finished(repository, "old")
    before = file.read_bytes()
    results = run(repository)
    results.add("new", {"value": 2})
    assert file.read_bytes() == before
    assert list(load(results.partial)["measurements"]) == ["new"]
    assert list(file.parent.iterdir()) == [file]


def test_a_run_that_is_finished_takes_its_place_and_leaves_nothing_beside(repository: Path) -> None:
    finished(repository, "old")
    file = finished(repository, "new")
    assert list(load(file)["measurements"]) == ["new"]
    assert list(file.parent.iterdir()) == [file]
    assert list((repository.parent / "partial").iterdir()) == []


def test_what_was_interrupted_goes_on_and_before_it_what_was_finished(repository: Path) -> None:
    finished(repository, "old")
    assert run(repository, resume=True).has("old")
    run(repository).add("new", {"value": 2})
    going_on = run(repository, resume=True)
    assert going_on.has("new")
    assert not going_on.has("old")
    assert not run(repository).has("new")


def test_two_files_of_one_name_have_two_partial_ones(repository: Path) -> None:
    other = Results(repository / "made_up.json", "made_up", {}, False, repository.parent / "partial")
    assert other.partial != run(repository).partial


def test_another_setting_or_commit_is_refused(repository: Path) -> None:
    finished(repository, "old")
    with pytest.raises(ValueError, match=r"has other settings \(\{'setting': 1\}\); resume with those, or start anew"):
        run(repository, resume=True, settings=2)
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "more")
    with pytest.raises(ValueError, match="was measured on commit"):
        run(repository, resume=True)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"kind": "made_up", "settings": {"setting": 1}, "machine": {}}'])
def test_what_is_no_result_is_refused_as_one(repository: Path, content: str) -> None:
    (repository / "perf" / "results" / "made_up.json").write_text(content)
    with pytest.raises(ValueError, match=r"made_up\.json can't be resumed, it isn't a result's file"):
        run(repository, resume=True)


def test_a_file_of_an_older_form_is_refused(repository: Path) -> None:
    file = finished(repository, "old")
    content = load(file)
    del content["machine"]["changes_sha256"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"is of an older form, without \['changes_sha256'\]"):
        run(repository, resume=True)


def test_what_a_run_and_the_report_write_is_no_change(repository: Path) -> None:
    for name in ("README.md", "docs/benchmarks.md", "docs/new.svg", "perf/results/new.json"):
        (repository / name).write_text("after\n")
    assert environment.describe()["uncommitted_changes"] is False
    assert environment.sources()["changes_sha256"] is None


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_code_that_is_edited_during_a_run_is_told(repository: Path, name: str) -> None:
    # From one uncommitted state to another one, too.
    (repository / name).write_text("at the start\n")
    results = run(repository)
    assert environment.sources()["uncommitted_changes"] is True
    (repository / name).write_text("in the end\n")
    results.finish()
    measured_on = load(repository / "perf" / "results" / "made_up.json")["machine"]
    assert measured_on["changed_during_run"] is True


def test_nothing_is_told_where_nothing_changed(repository: Path) -> None:
    (repository / "code.py").write_text("after\n")
    assert "changed_during_run" not in load(finished(repository, "one"))["machine"]
