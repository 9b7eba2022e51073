"""What `make quality` refuses before it loads anything."""

from __future__ import annotations

import sys

import pytest

from perf.quality.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "somewhere"], "--model needs --text (with make: MODEL needs TEXT)"),
        (["--context", "1"], "--context is 1; a row needs 2 tokens at least"),
    ],
)
def test_options_that_can_not_be_met_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_text_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", "--text", "absent.txt"])
    with pytest.raises(SystemExit) as end:
        main()
    assert str(end.value.code).startswith("quality: can't read absent.txt: No such file")
