"""docs/threats.md promises nothing that no test shows: every test, file and address that it names is there."""

from __future__ import annotations

import re

import pytest
from contract.readme_blocks import ROOT

DOCUMENT = ROOT / "docs" / "threats.md"
TEXT = DOCUMENT.read_text()
DEFENDED = re.search(r"^## Defended$(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
assert DEFENDED is not None
ROWS = re.findall(r"^\| (?!threat)([^|]+?) \| ([^|]+?) \| ([^|]+?) \|$", DEFENDED[1], re.MULTILINE)


def test_the_table_is_read() -> None:
    assert len(ROWS) >= 15


@pytest.mark.parametrize(("threat", "shown"), [(threat, shown) for threat, _, shown in ROWS])
def test_a_defence_names_what_shows_it(threat: str, shown: str) -> None:
    assert re.findall(r"`tests/|\]\(", shown), threat


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", TEXT))
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_every_link_leads_somewhere() -> None:
    headings = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        file, _, anchor = link.partition("#")
        assert (DOCUMENT.parent / file).exists(), link
        assert file or anchor in anchors, link


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", TEXT)) <= targets


def test_the_numbers_are_those_of_the_configs() -> None:
    config = (ROOT / "model_repository" / "llama" / "config.pbtxt").read_text()
    assert "max_queue_size: 256" in config
    assert "holds 256 requests" in TEXT
    assert "default_timeout_microseconds: 600000000" in config
    assert "ten minutes" in TEXT
