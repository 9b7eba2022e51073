"""`python -m perf.report`: documents and plots out of results, and the check that they are up to date."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from unit import made_up_results

from perf.report.blocks import PLOTS, TABLES
from perf.report.cli import DIFFERENT, FAILED, SAME, main
from perf.report.run import ROOT


@dataclass(frozen=True)
class Place:
    """A folder with results and a document that asks for every table and plot."""

    folder: Path

    @property
    def document(self) -> Path:
        return self.folder / "docs" / "x.md"

    @property
    def plots(self) -> Path:
        return self.folder / "plots"

    def report(self, *arguments: str) -> int:
        results = str(self.folder / "results")
        return main([str(self.document), "--results", results, "--plots", str(self.plots), *arguments])


def _place(folder: Path, *results: made_up_results.Content) -> Place:
    made_up_results.written(folder / "results", *results)
    blocks = [f"<!-- table: {name} -->\n<!-- end: {name} -->" for name in TABLES]
    blocks += [f"<!-- plot: {name} -->\n<!-- end: {name} -->" for name in PLOTS]
    found = Place(folder)
    found.document.parent.mkdir()
    found.document.write_text("before\n\n" + "\n\n".join(blocks) + "\n\nafter\n")
    return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Without the bench's results: their five plots take most of the time."""
    return _place(tmp_path, made_up_results.quality(), made_up_results.tune())


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Everything, reported once."""
    made_up = (made_up_results.bench, made_up_results.sweep, made_up_results.quality, made_up_results.tune)
    found = _place(tmp_path_factory.mktemp("report"), *(one() for one in made_up), made_up_results.gpu())
    assert found.report() == SAME
    return found


def test_everything_asked_for_is_there(reported: Place) -> None:
    text = reported.document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "Not measured yet" not in text
    assert "| in-flight INT8 |" in text
    assert "](../plots/scaling.svg)" in text
    assert {file.stem for file in reported.plots.iterdir()} == set(PLOTS)


def test_the_same_results_make_the_same_bytes(reported: Place) -> None:
    first = {file: file.read_bytes() for file in (reported.document, *reported.plots.iterdir())}
    for file in reported.plots.iterdir():
        file.unlink()
    reported.document.write_text(reported.document.read_text().replace("| in-flight", "| in-flihgt"))
    assert reported.report() == SAME
    assert {file: file.read_bytes() for file in (reported.document, *reported.plots.iterdir())} == first


def test_a_plot_is_an_svg_that_says_what_it_shows_and_nothing_of_this_machine(reported: Place) -> None:
    for file in reported.plots.iterdir():
        text = file.read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        # Letters are outlines; matplotlib leaves the texts in comments.
        assert "CPU: Made-up 9000, 2 cores; a made-up Llama" in text
        assert str(Path.home()) not in text
        assert "dc:date" not in text
    scaling = (reported.plots / "scaling.svg").read_text()
    for said in ("in-flight INT8", "limit of in-flight INT8", "tokens/s", "requests at a time"):
        assert f"<!-- {said} -->" in scaling


def test_what_was_reported_passes_the_check(place: Place) -> None:
    assert place.report("--check") == DIFFERENT
    assert place.report() == SAME
    assert place.report("--check") == SAME


def test_the_check_names_the_table_that_was_edited(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.report()
    place.document.write_text(place.document.read_text().replace("35.797", "12.345"))
    capsys.readouterr()
    assert place.report("--check") == DIFFERENT
    assert capsys.readouterr().err == (
        f"{place.document}: table 'quality' isn't what the results say: run python -m perf.report\n"
    )


def test_the_check_names_a_plot_that_is_missing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.report()
    (place.plots / "pareto.svg").unlink()
    capsys.readouterr()
    assert place.report("--check") == DIFFERENT
    assert capsys.readouterr().err.endswith("pareto.svg: plot 'pareto' isn't there: run python -m perf.report\n")


def test_the_check_names_a_plot_that_nothing_was_measured_for(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.plots.mkdir()
    (place.plots / "scaling.svg").write_text("<svg/>")
    place.report()
    assert "scaling.svg: skipped, not measured" in capsys.readouterr().out
    assert place.report("--check") == DIFFERENT
    assert "plot 'scaling' is there, and nothing in the results to draw it from" in capsys.readouterr().err


def test_without_results_each_block_says_what_would_measure_it(place: Place) -> None:
    for file in (place.folder / "results").iterdir():
        file.unlink()
    assert place.report() == SAME
    text = place.document.read_text()
    assert text.count("*Not measured yet") == len(TABLES) + len(PLOTS)
    assert "`make tune SLO_P95_MS=<milliseconds>`" in text
    assert text.count("`make sweep`") == 3
    assert not place.plots.exists()
    assert place.report("--check") == SAME


@pytest.mark.parametrize(
    ("document", "result", "message"),
    [
        ("<!-- table: article -->\n", "{}", "x.md: table 'article' has no <!-- end: article -->"),
        (
            "<!-- table: artcle -->\n<!-- end: artcle -->\n",
            "{}",
            "x.md: there is no table 'artcle'; there are article,",
        ),
        ("", '{"kind": "bench"', "other.json is not JSON"),
        ("", '{"kind": "bench"}', "other.json has no 'settings'"),
        ("", "[]", "other.json is [], not an object"),
    ],
)
def test_what_can_not_be_read_is_one_line_and_changes_nothing(
    place: Place, capsys: pytest.CaptureFixture[str], document: str, result: str, message: str
) -> None:
    place.document.write_text(document)
    (place.folder / "results" / "other.json").write_text(result)
    assert place.report() == FAILED
    error = capsys.readouterr().err
    assert error.startswith(f"report: {message}")
    assert error.count("\n") == 1
    assert place.document.read_text() == document
    assert not place.plots.exists()


def test_two_results_of_one_kind_are_refused(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (place.folder / "results" / "again.json").write_text((place.folder / "results" / "tune.json").read_text())
    assert place.report() == FAILED
    assert "again.json and tune.json are both of kind 'tune'" in capsys.readouterr().err


def test_nothing_of_it_needs_torch_or_a_gpu() -> None:
    modules = ["report.cli", "report.terminal", *(block.module.rsplit(".", 1)[0] for block in PLOTS.values())]
    program = (
        f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'transformers', 'triton'}} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": "perf"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "[]\n"
