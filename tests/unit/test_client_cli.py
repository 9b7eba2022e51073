"""The command line's parts: prompts files, output lines, wrong use, and what a chat remembers."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from triton_llama.cli.chat import Conversation
from triton_llama.cli.output import exit_code, on_one_line, outcome_as_json
from triton_llama.cli.prompts import Job, read_jobs
from triton_llama.tokenizer import Message

DEFAULTS = SamplingParams()


class Words:
    """A template whose tokens are words: `role: word word | ...`."""

    def render(self, messages: Sequence[Message]) -> str:
        return " | ".join(f"{message['role']}: {message['content']}" for message in messages)

    def count(self, prompt: str) -> int:
        return len(prompt.split())


def test_a_conversation_keeps_answered_messages_in_order() -> None:
    conversation = Conversation(Words(), "S", context=100, max_tokens=10)
    assert conversation.prompt("q0") == ("system: S | user: q0", 0)
    conversation.exchanges.append(("q1", "a1"))
    assert conversation.prompt("q2") == ("system: S | user: q1 | assistant: a1 | user: q2", 0)


def test_the_oldest_exchanges_are_left_out_first_and_the_system_message_never() -> None:
    conversation = Conversation(Words(), "S", 17, 3, [("q1", "a1"), ("q2", "a2")])
    assert conversation.prompt("q3") == ("system: S | user: q2 | assistant: a2 | user: q3", 1)
    assert conversation.prompt("q3 and much more than that") == ("system: S | user: q3 and much more than that", 1)
    assert conversation.exchanges == []


def test_a_message_longer_than_the_context_is_refused_and_removes_nothing() -> None:
    conversation = Conversation(Words(), None, 8, 5, [("q", "a")])
    refusal = r"a prompt of 4 tokens and max_tokens is 5, .* at most the context of 8"
    with pytest.raises(RejectedInputError, match=refusal):
        conversation.prompt("one two three")
    assert len(conversation.exchanges) == 1
    assert conversation.prompt("one two") == ("user: one two", 1)


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
        (("chat",), 2, "Missing option '--tokenizer'"),
        (("chat", "--tokenizer", "t", "--context", "1"), 2, "--context"),
        (("chat", "--tokenizer", "t", "--chat-template", "no-such-file"), 2, "no-such-file"),
        (("chat", "--tokenizer", "t", "--include-prompt"), 2, "No such option"),
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
