"""The tables in a terminal."""

from __future__ import annotations

from unit import made_up_results

from perf.report import terminal
from perf.report.run import Run
from perf.report.table import Table
from perf.report.tables import article


def test_no_line_of_the_summary_is_wider_than_a_terminal() -> None:
    text = terminal.summary(Run(made_up_results.bench(), "perf/results/bench.json"))
    assert max(map(len, text.splitlines())) <= 120
    for title in ("The article's setting", "at mixed lengths", "closed loop", "Poisson"):
        assert title in text


def test_it_is_the_table_of_the_documents_in_other_clothes() -> None:
    table = article.article(Run(made_up_results.bench(), "perf/results/bench.json"))
    assert table is not None
    lines = terminal.text(table).splitlines()
    # Too wide for one block: what doesn't fit stands beneath, the server's name before it again.
    first, second = (line for line in lines if line.startswith("in-flight INT8"))
    again = " ".join(table.rows[4][:2])
    assert [*first.split(), *second.split()[len(again.split()) :]] == " ".join(table.rows[4]).split()


def test_figures_are_never_broken_and_texts_are_where_there_is_no_room() -> None:
    table = Table(
        ["a long title of a column", "figures"], [False, True], [["words in a cell", "1.23 / 4.56"]], ["a `b`"]
    )
    assert terminal.text(table, 24).splitlines() == [
        "a long           figures",
        "title of a",
        "column",
        "-----------  -----------",
        "words in a   1.23 / 4.56",
        "cell",
        "",
        "a b",
    ]


def test_what_can_not_be_narrower_is_left_wide_rather_than_cut() -> None:
    table = Table(["a", "b"], [False, True], [["unbreakable", "1,234,567"]])
    assert terminal.text(table, 10).splitlines()[-1] == "unbreakable  1,234,567"
