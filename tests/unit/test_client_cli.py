"""The command line's wrong use and exit codes."""

from __future__ import annotations

import pytest
from triton_llama import (
    LlamaConnectionError,
    LlamaTimeoutError,
    ModelNotFoundError,
    OverloadedError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
)
from triton_llama.cli import cli, main


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (LlamaConnectionError, 3),
        (LlamaTimeoutError, 4),
        (RejectedInputError, 5),
        (OverloadedError, 6),
        (ServerError, 7),
        (ModelNotFoundError, 7),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, kind: type[TritonLlamaError], code: int
) -> None:
    def fail(**_: object) -> None:
        raise kind("broken")

    monkeypatch.setattr(cli.commands["generate"], "callback", fail)
    with pytest.raises(SystemExit) as end:
        main(["generate", "a"])
    assert end.value.code == code


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Missing command."),
        (("generate", "a", "--foo"), 2, "No such option"),
        (("generate", "a", "--max-tokens", "many"), 2, "'many' is not a valid integer"),
        (("generate", "a", "--url", "grpc://x", "--protocol", "http"), 2, "must start with http://"),
        (("generate", "a", "--timeout", "0"), 2, "--timeout"),
        (("generate", "a", "--seed", "-1"), 5, "seed is -1, must lie in 0 ... 18446744073709551615"),
        (("generate", "\udcff"), 5, "UTF-8"),
    ],
)
def test_wrong_use_is_one_line_with_an_exit_code(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    stdout, stderr = capfd.readouterr()
    assert (end.value.code, stdout, len(stderr.splitlines())) == (code, "", 1)
    assert stderr.startswith("triton-llama: error: ")
    assert message in stderr
