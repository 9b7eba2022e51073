"""docs/security.md: every defence names a test or a page, every named test exists, the numbers are the configs'."""

from __future__ import annotations

import re

import pytest
from contract.code_blocks import ROOT
from contract.configs import read_config

TEXT = (ROOT / "docs" / "security.md").read_text()
(DEFENDED,) = re.findall(r"^## Defended$(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
ROWS = re.findall(r"^\| (?!threat)([^|]+?) \| [^|]+? \| ([^|]+?) \|$", DEFENDED, re.MULTILINE)


def test_the_table_lists_at_least_fifteen_threats() -> None:
    assert len(ROWS) >= 15


@pytest.mark.parametrize(("threat", "shown"), ROWS)
def test_a_defence_names_a_test_or_a_page(threat: str, shown: str) -> None:
    assert re.findall(r"`tests/|\]\(", shown), threat


def test_every_named_test_exists() -> None:
    assert [name for name in re.findall(r"`(tests/[\w/.]+)`", TEXT) if not (ROOT / name).is_file()] == []


def test_the_bounds_of_the_queue_are_the_configs() -> None:
    policy = read_config("config").dynamic_batching.default_queue_policy
    assert f"holds {policy.max_queue_size} requests" in TEXT
    assert policy.default_timeout_microseconds == 600_000_000
    assert "ten minutes" in TEXT
