"""The faults of `make faults` can still be inserted."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS: tuple[tuple[str, ...], ...] = runpy.run_path(str(ROOT / "scripts" / "faults.py"))["FAULTS"]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_the_text_that_a_fault_replaces_occurs_once_and_its_tests_exist(fault: tuple[str, ...]) -> None:
    _, file, old, new, every = fault
    assert (ROOT / file).read_text().count(old) == 1
    assert new != old
    for tests in every.split():
        assert (ROOT / tests.partition("::")[0]).exists()
