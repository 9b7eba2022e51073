"""The command line's wrong use and exit codes."""

from __future__ import annotations

import socket

import pytest
from click.testing import CliRunner
from client.peers import HOST
from triton_llama import (
    Completion,
    LlamaClient,
    LlamaConnectionError,
    LlamaTimeoutError,
    ModelNotFoundError,
    OverloadedError,
    RejectedInputError,
    SamplingParams,
    ServerError,
    TritonLlamaError,
)
from triton_llama.cli import main


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
    def fail(*_: object) -> None:
        raise kind("broken")

    monkeypatch.setattr(LlamaClient, "generate", fail)
    result = CliRunner().invoke(main, ["generate", "a"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "Error: broken\n")


@pytest.mark.parametrize("arguments", [("generate", "a"), ("generate", "a", "--stream"), ("status",)])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_a_server_a_command_is_one_line_and_exit_code_3(protocol: str, arguments: tuple[str, ...]) -> None:
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        url = f"{protocol}://{HOST}:{bound.getsockname()[1]}"
        result = CliRunner().invoke(main, [*arguments, "--url", url])
    assert (result.exit_code, len(result.stderr.splitlines())) == (3, 1)
    assert f"no connection to {url}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "params"),
    [
        (["--max-tokens", "4"], SamplingParams(max_tokens=4)),
        (
            ["--stop-words", "a", "--stop-words", "b", "--top-p", "0.5"],
            SamplingParams(stop_words=("a", "b"), top_p=0.5),
        ),
        (["--exclude-input-in-output", "false"], SamplingParams(exclude_input_in_output=False)),
        (["--from-checkpoint", "--seed", "7"], SamplingParams.from_checkpoint().with_options(seed=7)),
    ],
)
def test_an_option_sets_its_parameter_alone(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], params: SamplingParams
) -> None:
    received: list[object] = []

    def keep(_: LlamaClient, prompt: str, options: SamplingParams) -> Completion:
        received.extend((prompt, options))
        return Completion("b", "stop", 1, 1, "", 7)

    monkeypatch.setattr(LlamaClient, "generate", keep)
    assert CliRunner().invoke(main, ["generate", "a", *arguments]).stdout == "b\n"
    assert received == ["a", params]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "a", "--foo"], 2, "No such option"),
        (["generate", "a", "--max-tokens", "many"], 2, "'many' is not a valid integer"),
        (["generate", "a", "--url", "grpc://x:0"], 2, "must be HOST:PORT"),
        (["generate", "a", "--timeout", "0"], 2, "--timeout"),
        (["generate", "a", "--seed", "-1"], 5, "seed is -1, must lie in 0 ... 18446744073709551615"),
        (["generate", "\udcff"], 5, "UTF-8"),
    ],
)
def test_wrong_use_has_an_error_with_an_exit_code(arguments: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr.splitlines()[-1]


def test_stdin_that_is_not_utf_8_is_refused_with_its_byte() -> None:
    result = CliRunner().invoke(main, ["generate"], input=b"ab\xff")
    assert result.exit_code == 2
    assert "stdin is not UTF-8 at byte 2" in result.stderr
