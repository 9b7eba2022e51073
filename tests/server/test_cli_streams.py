"""The command line's streams against a real Triton: `generate --stream`, and `chat` on a terminal and on a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial

import pytest
from server.clients import at_once
from server.metrics import Metrics
from server.servers import EMBEDDED
from server.terminal import CODE, COMMAND, CTRL_C, CTRL_D, Terminal, on_a_terminal, run, url
from triton_local.server import LocalTriton

# A shell's background job would hand down an ignored SIGINT.
WITH_CTRL_C = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {CODE}"

LONG = ("-n", "300", "--min-tokens", "300")
CHAT = ("chat", "--tokenizer", str(EMBEDDED))
ANSWER = ("-n", "160", "--min-tokens", "160", "--context", "336")

PROTOCOLS = ("http", "grpc")
both_protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


@both_protocols
def test_the_command_prints_the_same_text_in_pieces(streaming: LocalTriton, protocol: str) -> None:
    arguments = ("generate", "É The for statement", "-n", "20", "-t", "1", "--seed", "7", "--include-prompt")
    plain = run(streaming, protocol, *arguments)
    streamed = run(streaming, protocol, *arguments, "--stream")
    assert (streamed.returncode, streamed.stderr, streamed.stdout) == (0, "", plain.stdout)
    lines = run(streaming, protocol, *arguments, "--stream", "--json").stdout.splitlines()
    pieces = [json.loads(line) for line in lines]
    assert "".join(piece["text"] for piece in pieces) + "\n" == plain.stdout
    assert [piece["seed"] for piece in pieces] == [7] * len(pieces)
    assert pieces[-1]["finish_reason"]


@both_protocols
def test_ctrl_c_stops_the_command_and_the_request(slow_streaming: LocalTriton, protocol: str) -> None:
    metrics = Metrics(slow_streaming)
    with subprocess.Popen(
        [*COMMAND, WITH_CTRL_C, "generate", "def", "--stream", *LONG, "--url", url(slow_streaming, protocol)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout[-1:], stderr.strip()) == (130, b"\n", b"")
    metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")


def test_a_server_that_cannot_stream_is_told_with_the_way_out(triton: LocalTriton) -> None:
    jobs = [
        partial(run, triton, protocol, *command, stdin="def\n")
        for protocol in PROTOCOLS
        for command in (("generate", "def", "--stream"), CHAT)
    ]
    for result in at_once(jobs):
        assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (7, "", 1), result.args
        assert "make serve VARIANT=streaming" in result.stderr


def test_on_a_terminal_ctrl_c_stops_the_answer_and_not_the_chat(slow_streaming: LocalTriton) -> None:
    # Both begin at once, because what they import takes long.
    http, grpc = ([*CHAT, *ANSWER, "--url", url(slow_streaming, protocol)] for protocol in PROTOCOLS)
    with on_a_terminal(http) as over_http, on_a_terminal(grpc) as over_grpc:
        _chat(slow_streaming, over_http)
        _chat(slow_streaming, over_grpc)


def _chat(server: LocalTriton, terminal: Terminal) -> None:
    """Have a conversation, to its end."""

    def hello(expected: str, reason: str) -> float:
        """Say hello and return of how many tokens the prompt was."""
        metrics = Metrics(server)
        terminal.type("hello\n")
        terminal.read_until("hello\r\n")
        if reason == "cancelled":
            terminal.read_more()
            terminal.type(CTRL_C)
        terminal.read_until(expected)
        terminal.read_until("> ")
        metrics.wait_for(1, "llama_requests_total", finish_reason=reason)
        return metrics.grown("llama_prompt_tokens_total")

    terminal.read_until("> ")
    alone = hello("^C", "cancelled")
    # The message and the part of its answer that was shown are remembered, until they are not to be.
    assert hello("(cut off after 160 tokens; --max-tokens allows more)", "length") > 2 * alone
    terminal.type("/reset\n")
    terminal.read_until("> ")
    assert hello("(cut off after 160 tokens", "length") == alone
    # An answer of 160 tokens and room for 160 more are too many for the context.
    assert hello("(left out to fit the context: 1 of the oldest exchanges)", "length") == alone
    terminal.type(CTRL_C)
    terminal.read_until("> ")
    terminal.type(CTRL_D)
    assert terminal.exit_code() == 0


def test_the_lines_of_a_pipe_are_turns_and_one_that_fails_harms_no_other(streaming: LocalTriton) -> None:
    metrics = Metrics(streaming)
    turns = ["What is a list?", "", "word " * 600, "And a dict?", "/exit", "never sent"]
    chat = (*CHAT, "-n", "20", "--system", "Be brief")
    for result in at_once([partial(run, streaming, protocol, *chat, stdin="\n".join(turns)) for protocol in PROTOCOLS]):
        assert result.returncode == 5, result.args
        assert len(result.stderr.splitlines()) == 1
        assert "together they must be at most the context of 512" in result.stderr
        assert result.stdout.count("\n") >= 2
    metrics.wait_for(2 * len(PROTOCOLS), "llama_time_to_first_token_seconds_count")
