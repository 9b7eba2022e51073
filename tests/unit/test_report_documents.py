"""`python -m perf.report`: documents and plots from results, and the check that they are current."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from unit import made_up_results

from perf.report.canvas import apart
from perf.report.documents import DIFFERENT, FAILED, PLOTS, SAME, TABLES, MarkerError, main, places


@dataclass(frozen=True)
class Folder:
    """A folder with results and a document that has a block for every table and plot."""

    path: Path

    @property
    def document(self) -> Path:
        return self.path / "docs" / "x.md"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def report(self, *arguments: str) -> int:
        results = str(self.path / "results")
        return main([str(self.document), "--results", results, "--plots", str(self.plots), *arguments])


def _folder(path: Path, *results: made_up_results.Content) -> Folder:
    made_up_results.written(path / "results", *results)
    names = [("table", name) for name in TABLES] + [("plot", name) for name in PLOTS]
    found = Folder(path)
    found.document.parent.mkdir()
    blocks = "\n\n".join(f"<!-- {kind}: {name} -->\n<!-- end: {name} -->" for kind, name in names)
    found.document.write_text(f"before\n\n{blocks}\n\nafter\n")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Without the bench's results: its five plots take most of the time."""
    return _folder(tmp_path, made_up_results.quality(), made_up_results.tune())


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Everything, reported once."""
    made_up = (made_up_results.bench, made_up_results.sweep, made_up_results.quality, made_up_results.tune)
    found = _folder(tmp_path_factory.mktemp("report"), *(one() for one in made_up), made_up_results.gpu())
    assert found.report() == SAME
    return found


def test_every_block_is_filled_and_the_rest_stays(reported: Folder) -> None:
    text = reported.document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "Not measured yet" not in text
    assert "| in-flight INT8 |" in text
    assert "](../plots/scaling.svg)" in text
    assert {file.stem for file in reported.plots.iterdir()} == set(PLOTS)


def test_the_same_results_make_the_same_bytes(reported: Folder) -> None:
    first = {file: file.read_bytes() for file in (reported.document, *reported.plots.iterdir())}
    for file in reported.plots.iterdir():
        file.unlink()
    reported.document.write_text(reported.document.read_text().replace("| in-flight", "| in-flihgt"))
    assert reported.report() == SAME
    assert {file: file.read_bytes() for file in (reported.document, *reported.plots.iterdir())} == first


def test_a_plot_is_an_svg_that_names_its_device_and_nothing_of_this_machine(reported: Folder) -> None:
    for file in reported.plots.iterdir():
        text = file.read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        # Letters are outlines; matplotlib leaves the texts in comments.
        assert "CPU: Made-up 9000, 2 cores; a made-up Llama" in text
        assert str(Path.home()) not in text
        assert "dc:date" not in text
    scaling = (reported.plots / "scaling.svg").read_text()
    for text in ("in-flight INT8", "limit of in-flight INT8", "tokens/s", "requests at a time"):
        assert f"<!-- {text} -->" in scaling


@pytest.mark.parametrize("damaged", ["table 'quality'", "plot 'pareto'"])
def test_the_check_passes_after_a_report_and_names_what_differs(
    damaged: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [folder.report("--check"), folder.report(), folder.report("--check")] == [DIFFERENT, SAME, SAME]
    if damaged == "plot 'pareto'":
        file, state = folder.plots / "pareto.svg", "does not exist"
        file.unlink()
    else:
        file, state = folder.document, "differs from the results"
        file.write_text(file.read_text().replace("35.797", "12.345"))
    capsys.readouterr()
    assert folder.report("--check") == DIFFERENT
    assert capsys.readouterr().err == f"{file}: {damaged} {state}: run python -m perf.report\n"


def test_the_check_names_a_plot_without_results(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.plots.mkdir()
    (folder.plots / "scaling.svg").write_text("<svg/>")
    folder.report()
    assert "scaling.svg: skipped, not measured" in capsys.readouterr().out
    assert folder.report("--check") == DIFFERENT
    assert "plot 'scaling' exists although its results don't: delete it" in capsys.readouterr().err


def test_without_results_each_block_names_the_command_that_measures_it(folder: Folder) -> None:
    for file in (folder.path / "results").iterdir():
        file.unlink()
    assert folder.report() == SAME
    text = folder.document.read_text()
    assert text.count("*Not measured yet") == len(TABLES) + len(PLOTS)
    assert "`make tune SLO_P95_MS=<milliseconds>`" in text
    assert text.count("`make sweep`") == 3
    assert not folder.plots.exists()
    assert folder.report("--check") == SAME


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
        ("", '{"kind": "bench"}', "other.json: date: Field required"),
        ("", "[]", "other.json: Input should be an object, found []"),
        ("", json.dumps(made_up_results.tune()), "other.json and tune.json are both of kind 'tune'"),
    ],
)
def test_an_unreadable_file_is_one_line_and_changes_nothing(
    folder: Folder, capsys: pytest.CaptureFixture[str], document: str, result: str, message: str
) -> None:
    folder.document.write_text(document)
    (folder.path / "results" / "other.json").write_text(result)
    assert folder.report() == FAILED
    error = capsys.readouterr().err
    assert error.startswith(f"report: {message}")
    assert error.count("\n") == 1
    assert folder.document.read_text() == document
    assert not folder.plots.exists()


def test_blocks_are_found_in_order_and_a_marker_inside_a_sentence_is_text() -> None:
    text = "# Title\n\n<!-- table: a -->\nold\n<!-- end: a -->\n\n<!--plot: b-->\n\n<!-- end: b -->\nafter\n"
    text += "write `<!-- table: a -->` before the table\n"
    assert [(place.kind, place.name) for place in places("x.md", text)] == [("table", "a"), ("plot", "b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: a -->\n", "x.md: table 'a' has no <!-- end: a -->"),
        ("\n<!-- end: a -->\n", "x.md, line 2: the end of 'a' has no beginning"),
        ("<!-- table: a -->\n<!-- end: b -->\n", "x.md, line 2: found the end of 'b', expected that of table 'a'"),
        (
            "<!-- table: a -->\n<!-- plot: b -->\n<!-- end: b -->\n",
            "x.md, line 2: plot 'b' begins before the end of table 'a'",
        ),
    ],
)
def test_an_unmatched_marker_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(MarkerError) as caught:
        list(places("x.md", text))
    assert str(caught.value) == message


@pytest.mark.parametrize("wanted", [[], [30.0, 10.0, 50.0]])
def test_labels_with_room_stay_in_place(wanted: list[float]) -> None:
    assert apart(wanted, 12) == wanted


@pytest.mark.parametrize("wanted", [[10.0, 10.0, 10.0], [0.0, 4.0, 21.0, 22.0], [5.0, 1.0, 9.0, 40.0, 41.0, 30.0]])
def test_close_labels_keep_their_order_and_distance(wanted: list[float]) -> None:
    placed = apart(wanted, 12)
    assert len(placed) == len(wanted)
    in_order = [height for _, height in sorted(zip(wanted, placed, strict=True))]
    assert all(upper - lower >= 12 - 1e-9 for lower, upper in pairwise(in_order))
    # Moved around the middle, not all to one side.
    assert sum(placed) == pytest.approx(sum(wanted))
