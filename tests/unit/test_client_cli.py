"""The command line where no server is needed: prompts files, refusals, one line and an exit code for each failure."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from triton_llama import Completion, SamplingParams, ServerError
from triton_llama.cli.output import on_one_line, outcome_as_json
from triton_llama.cli.prompts import Job, read_jobs

DEFAULTS = SamplingParams()
COMMAND = (sys.executable, "-W", "error", "-c", "from triton_llama.cli import main; main()")


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, timeout=60, check=False)


@pytest.fixture
def dead_url() -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_a_text_file_has_a_prompt_a_line_and_its_line_numbers(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("first\r\n\n  \n sécond\u2028still second\nlast".encode())
    assert read_jobs(str(file), DEFAULTS) == [
        Job(1, "first", DEFAULTS),
        Job(4, " sécond\u2028still second", DEFAULTS),
        Job(5, "last", DEFAULTS),
    ]


def test_a_jsonl_line_wins_over_the_options(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb", "max_tokens": 3, "top_p": null, "stop_words": ["x"]}\n{"prompt": "c"}\n')
    first, second = read_jobs(str(file), SamplingParams(max_tokens=9, temperature=0.5))
    assert first.prompt == "a\nb"
    assert first.params == SamplingParams(max_tokens=3, temperature=0.5, top_p=None, stop_words=["x"])
    assert second.params == SamplingParams(max_tokens=9, temperature=0.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not JSON"),
        (b'"text"', 'line 2 must be an object with a string "prompt"'),
        (b'{"prompt": 3}', 'line 2 must be an object with a string "prompt"'),
        (b'{"prompt": "a", "max_token": 3}', "line 2 has an unknown key 'max_token', must be one of prompt, "),
        (b'{"prompt": "\xff"}', "is not UTF-8 at byte 28"),
    ],
)
def test_a_malformed_line_is_refused_by_number_before_anything_is_sent(
    tmp_path: Path, line: bytes, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' + line)
    with pytest.raises(click.UsageError) as error:
        read_jobs(str(file), DEFAULTS)
    assert message in str(error.value)


def test_line_breaks_in_a_completion_cannot_shift_the_lines_after_it() -> None:
    assert on_one_line("a\\n\nb\r") == "a\\\\n\\nb\\r"


def test_json_has_the_line_and_either_all_fields_or_an_error() -> None:
    completion = Completion("é\n", "stop", 1, 2, "id", 2**64 - 1)
    assert json.loads(outcome_as_json(4, completion)) == {
        "line": 4,
        "text": "é\n",
        "finish_reason": "stop",
        "num_input_tokens": 1,
        "num_output_tokens": 2,
        "request_id": "id",
        "seed": 2**64 - 1,
    }
    assert json.loads(outcome_as_json(5, ServerError("broken"))) == {
        "line": 5,
        "error": {"type": "ServerError", "message": "broken"},
    }


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "message"),
    [
        ((), b"", 2, "Missing command."),
        (("generate", "a", "--foo"), b"", 2, "No such option"),
        (("generate", "a", "--max-tokens", "many"), b"", 2, "'many' is not a valid integer"),
        (("generate", "a", "--url", "grpc://x", "--protocol", "http"), b"", 2, "must start with http://"),
        (("generate", "a", "--timeout", "0"), b"", 2, "--timeout"),
        (("generate", "a", "--prompts-file", "-"), b"", 2, "give either PROMPT or --prompts-file"),
        (("generate", "--stream", "--prompts-file", "-"), b"a", 2, "--stream is for one PROMPT"),
        (("generate",), b"ab\xff", 2, "stdin is not UTF-8 at byte 2"),
        (("generate", "a", "--seed", "-1"), b"", 5, "seed is -1, must lie in 0 ... 18446744073709551615"),
        (("generate", b"\xff".decode("utf-8", "surrogateescape")), b"", 5, "UTF-8"),
    ],
)
def test_wrong_use_is_one_line_and_its_exit_code(
    arguments: tuple[str, ...], stdin: bytes, code: int, message: str
) -> None:
    result = run(*arguments, stdin=stdin)
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, len(lines), result.stdout) == (code, 1, b"")
    assert lines[0].startswith("triton-llama: error: ")
    assert message in lines[0]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    "command",
    [("generate", "a"), ("generate", "a", "--stream"), ("status",), ("generate", "--prompts-file", "-")],
)
def test_no_server_is_one_line_and_exit_code_3(command: tuple[str, ...], protocol: str, dead_url: str) -> None:
    result = run(*command, "--url", dead_url, "--protocol", protocol, stdin=b"a")
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, len(lines)) == (3, 1)
    assert f"no connection to {protocol}://{dead_url}" in lines[0]


def test_debug_shows_the_traceback(dead_url: str) -> None:
    assert b"Traceback" in run("--debug", "status", "--url", dead_url).stderr


def test_help_lists_the_exit_codes_and_every_sampling_option() -> None:
    assert b"Exit codes:" in run("--help").stdout
    text = run("generate", "--help").stdout.decode()
    for name in ("max-tokens", "min-tokens", "temperature", "top-k", "top-p", "repetition-penalty", "seed"):
        assert f"--{name}" in text


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    "command", [("generate", "a"), ("generate", "a", "--stream"), ("generate", "--prompts-file", "FILE")]
)
def test_ctrl_c_ends_a_waiting_command_without_a_traceback(
    command: tuple[str, ...], protocol: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\n")
    arguments = [str(file) if word == "FILE" else word for word in command]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [*COMMAND, *arguments, "--url", url, "--protocol", protocol, "--connect-timeout", "50"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A shell's background job would hand down an ignored SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (130, b"")
    assert stderr.strip() == b""
