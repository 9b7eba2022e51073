"""The command line's wrong use and exit codes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from client.peers import HOST
from frontend.fake_triton import FakeTriton
from frontend.fake_triton_grpc import fake_triton
from grpc import StatusCode
from triton_llama.cli import main
from triton_llama.tensors import Value


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as triton:
        triton.decoupled, triton.tokens = False, ["b"]
        yield triton


def run(triton: FakeTriton, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["generate", "a", "--url", f"grpc://{HOST}:{triton.port}", *arguments])


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (StatusCode.DEADLINE_EXCEEDED, "late", 4),
        (StatusCode.INVALID_ARGUMENT, "INVALID_ARG: top_p is 2", 5),
        (StatusCode.UNAVAILABLE, "QUEUE_FULL: broken", 6),
        (StatusCode.INTERNAL, "INTERNAL: broken", 7),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    triton: FakeTriton, status: StatusCode, message: str, code: int
) -> None:
    triton.failing, triton.status = message, status
    result = run(triton)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (code, "", 1)
    assert result.stderr.startswith("Error: ")


@pytest.mark.parametrize(
    ("protocol", "arguments"),
    [
        ("http", ("generate", "a")),
        ("grpc", ("generate", "a", "--stream")),
        ("http", ("status",)),
        ("grpc", ("status",)),
    ],
)
def test_without_a_server_a_command_is_one_line_and_exit_code_3(protocol: str, arguments: tuple[str, ...]) -> None:
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        url = f"{protocol}://{HOST}:{bound.getsockname()[1]}"
        result = CliRunner().invoke(main, [*arguments, "--url", url])
    assert (result.exit_code, len(result.stderr.splitlines())) == (3, 1)
    assert f"no connection to {url}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "inputs"),
    [
        (["--stop-words", "x", "--stop-words", "y", "--top-p", "0.5"], {"stop_words": ["x", "y"], "top_p": [0.5]}),
        (["--exclude-input-in-output", "false"], {"exclude_input_in_output": [False]}),
    ],
)
def test_an_option_sets_its_parameter_alone(
    triton: FakeTriton, arguments: list[str], inputs: dict[str, list[Value]]
) -> None:
    assert run(triton, "--seed", "7").stdout == "b\n"
    assert run(triton, "--seed", "7", *arguments).stdout == "b\n"
    assert triton.last.inputs == triton.requests[0].inputs | inputs


def test_the_command_line_starts_without_what_run_batch_alone_needs() -> None:
    names = {"aiohttp", "triton_llama.batch.answer_file"}
    program = f"import sys, triton_llama.cli; assert not {names} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_from_checkpoint_sends_what_is_given_alone(triton: FakeTriton) -> None:
    run(triton, "--from-checkpoint", "--seed", "7")
    assert triton.last.inputs == {"text_input": ["a"], "seed": [7]}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
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
