"""The command line's parts: prompts files, output lines and wrong use."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from triton_llama import (
    Completion,
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
from triton_llama.cli.output import exit_code, on_one_line, outcome_as_json
from triton_llama.cli.prompts import Job, read_jobs

DEFAULTS = SamplingParams()


def test_a_text_file_has_one_prompt_a_line_and_keeps_line_numbers(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("first\r\n\n  \n sécond\u2028still second\nlast".encode())
    assert read_jobs(str(file), DEFAULTS) == [
        Job(1, "first", DEFAULTS),
        Job(4, " sécond\u2028still second", DEFAULTS),
        Job(5, "last", DEFAULTS),
    ]


def test_a_jsonl_line_overrides_the_options(tmp_path: Path) -> None:
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
def test_a_malformed_line_is_refused_by_its_number(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' + line)
    with pytest.raises(click.UsageError, match=message):
        read_jobs(str(file), DEFAULTS)


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
def test_each_kind_of_failure_has_its_exit_code(kind: type[TritonLlamaError], code: int) -> None:
    assert exit_code(kind("broken")) == code


def test_a_completion_is_one_line_in_plain_output() -> None:
    assert on_one_line("a\\n\nb\r") == "a\\\\n\\nb\\r"


def test_a_json_line_has_its_number_and_either_all_fields_or_an_error() -> None:
    fields = {"text": "é\n", "finish_reason": "stop", "num_input_tokens": 1, "num_output_tokens": 2}
    fields |= {"request_id": "id", "seed": 2**64 - 1}
    completion = Completion("é\n", "stop", 1, 2, "id", 2**64 - 1)
    assert json.loads(outcome_as_json(4, completion)) == {"line": 4, **fields}
    error = {"type": "ServerError", "message": "broken"}
    assert json.loads(outcome_as_json(5, ServerError("broken"))) == {"line": 5, "error": error}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Missing command."),
        (("generate", "a", "--foo"), 2, "No such option"),
        (("generate", "a", "--max-tokens", "many"), 2, "'many' is not a valid integer"),
        (("generate", "a", "--url", "grpc://x", "--protocol", "http"), 2, "must start with http://"),
        (("generate", "a", "--timeout", "0"), 2, "--timeout"),
        (("generate", "a", "--prompts-file", "-"), 2, "give either PROMPT or --prompts-file"),
        (("generate", "--stream", "--prompts-file", "-"), 2, "--stream is for one PROMPT"),
        (("generate", "a", "--seed", "-1"), 5, "seed is -1, must lie in 0 ... 18446744073709551615"),
        (("generate", "\udcff"), 5, "UTF-8"),
    ],
)
def test_wrong_use_is_one_line_and_an_exit_code(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    stdout, stderr = capfd.readouterr()
    assert (end.value.code, stdout, len(stderr.splitlines())) == (code, "", 1)
    assert stderr.startswith("triton-llama: error: ")
    assert message in stderr
