"""`make quality` refuses unusable options before it loads anything."""

from __future__ import annotations

import sys

import pytest

from perf.quality.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model somewhere", "--model needs --text (with make: MODEL needs TEXT)"),
        ("--context 1", "--context is 1; a row needs 2 tokens at least"),
    ],
)
def test_conflicting_options_are_refused_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_text_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", "--text", "absent.txt"])
    with pytest.raises(SystemExit) as end:
        main()
    assert str(end.value.code).startswith("quality: can't read absent.txt: No such file")
