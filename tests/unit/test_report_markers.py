"""Finding the blocks of a document, and what is said where they can't be found."""

from __future__ import annotations

import pytest

from perf.report.markers import MarkerError, filled, places

DOCUMENT = """# Title

<!-- table: article -->
old
<!-- end: article -->

between

<!--plot: scaling-->

<!-- end: scaling -->
after
"""


def test_blocks_are_found_in_order_with_kind_and_name() -> None:
    assert [(place.kind, place.name) for place in places("x.md", DOCUMENT)] == [
        ("table", "article"),
        ("plot", "scaling"),
    ]


def test_filling_changes_nothing_outside_and_can_be_done_again() -> None:
    first, second = places("x.md", DOCUMENT)
    text = filled(filled(DOCUMENT, second, "![x](x.svg)"), first, "| new |")
    assert text == DOCUMENT.replace("\nold\n", "\n\n| new |\n\n").replace(
        "<!--plot: scaling-->\n\n", "<!--plot: scaling-->\n\n![x](x.svg)\n\n"
    )
    again = places("x.md", text)[0]
    assert filled(text, again, "| new |") == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: a -->\n", "x.md: table 'a' has no <!-- end: a -->"),
        ("\n<!-- end: a -->\n", "x.md, line 2: the end of 'a' has no beginning"),
        ("<!-- table: a -->\n<!-- end: b -->\n", "x.md, line 2: the end of 'b' stands where table 'a' should end"),
        (
            "<!-- table: a -->\n<!-- plot: b -->\n<!-- end: b -->\n",
            "x.md, line 2: plot 'b' begins before table 'a' has its end",
        ),
    ],
)
def test_a_marker_without_its_other_end_is_named(text: str, message: str) -> None:
    with pytest.raises(MarkerError) as caught:
        places("x.md", text)
    assert str(caught.value) == message


def test_markers_inside_of_a_sentence_are_text() -> None:
    assert places("x.md", "write `<!-- table: a -->` before the table\n") == []
