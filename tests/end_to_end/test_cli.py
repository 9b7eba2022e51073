"""The command line against a real Triton that runs the real model; tests/client has its wrong use and exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest
from click.testing import CliRunner, Result
from end_to_end.metrics import Metrics
from triton_llama import Completion
from triton_llama.cli import main
from triton_local.server import LocalTriton

# A shell's background job would hand down an ignored SIGINT.
CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from triton_llama.cli import main; main()"
)

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def url(server: LocalTriton, protocol: str) -> str:
    return f"{protocol}://{server.http_address if protocol == 'http' else server.grpc_address}"


def run(server: LocalTriton, protocol: str, *arguments: str, stdin: str = "") -> Result:
    """Run a command of `triton-llama` against this server."""
    return CliRunner().invoke(main, [*arguments, "--url", url(server, protocol)], input=stdin)


def test_stdin_is_completed_without_its_last_line_break(triton: LocalTriton) -> None:
    options = ("--max-tokens", "4", "--exclude-input-in-output", "false", "--json")
    result = run(triton, "http", "generate", *options, stdin="A list\nis\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["text"].startswith("A list\nis")
    assert not json.loads(result.stdout)["text"].startswith("A list\nis\n\n")


def test_json_has_every_field_and_its_seed_repeats_the_text(triton: LocalTriton) -> None:
    arguments = ("generate", "A list", "--max-tokens", "8", "--temperature", "1", "--json")
    first = json.loads(run(triton, "http", *arguments).stdout)
    assert first.keys() == {field.name for field in fields(Completion)}
    again = run(triton, "grpc", *arguments, "--seed", str(first["seed"]))
    assert json.loads(again.stdout)["text"] == first["text"]


def test_status_shows_how_the_server_computes(triton: LocalTriton) -> None:
    """The server's log names the same computation."""
    metrics = f"--metrics-url={triton.metrics_address}"
    plain = run(triton, "http", "status", metrics)
    assert plain.exit_code == 0
    for expected in ("live, ready", "llama: ready", "preferred 4 8 16 32, delay 1 ms", "quantization = int8"):
        assert expected in plain.stdout
    (computation,) = re.findall(r"^computes    (.*INT8.*); KV cache \w+; on cpu$", plain.stdout, re.MULTILINE)
    assert f"decode steps: {computation}, " in triton.log_text()
    state = json.loads(run(triton, "grpc", "status", "--json", metrics).stdout)
    assert state["config"]["preferred_batch_sizes"] == [4, 8, 16, 32]
    assert [instance["computation"] for instance in state["instances"]] == [computation]


def test_status_counts_right_guesses_as_text_and_as_json(triton: LocalTriton) -> None:
    for _ in range(2):
        run(triton, "http", "generate", "A list", "--max-tokens", "16", "--temperature", "0")
    status = ("status", f"--metrics-url={triton.metrics_address}")
    ends_at = time.monotonic() + 10
    guesses, shown = "", ["not read"]
    # Metrics follow the answers.
    while not guesses or shown != [guesses]:
        assert time.monotonic() < ends_at, (guesses, shown)
        shown = re.findall("^drafts      right guesses: (.*)$", run(triton, "http", *status).stdout, re.MULTILINE)
        drafts = json.loads(run(triton, "http", *status, "--json").stdout)["drafts"]
        guesses = ", ".join(f"{source} {counts['right']} of {counts['guessed']}" for source, counts in drafts.items())


@both_protocols
def test_status_names_the_servers_address(triton: LocalTriton, protocol: str) -> None:
    state = json.loads(run(triton, protocol, "status", "--json").stdout)
    assert state["url"] == url(triton, protocol)


@both_protocols
def test_a_missing_model_is_one_line_with_exit_code_7(triton: LocalTriton, protocol: str) -> None:
    shown = run(triton, protocol, "status", "--model", "no-such-model")
    assert shown.exit_code == 7
    assert "no-such-model: not ready" in shown.stdout
    refused = run(triton, protocol, "generate", "a", "--model", "no-such-model")
    assert (refused.exit_code, refused.stdout, len(refused.stderr.splitlines())) == (7, "", 1)
    assert re.match("Error: .*no-such-model", refused.stderr)


def test_a_stream_prints_the_same_text_in_chunks(streaming: LocalTriton) -> None:
    arguments = ("generate", "É The for statement", "--max-tokens", "20", "--temperature", "1", "--seed", "7")
    plain = run(streaming, "http", *arguments)
    streamed = run(streaming, "http", *arguments, "--stream")
    assert (streamed.exit_code, streamed.stderr, streamed.stdout) == (0, "", plain.stdout)
    chunks = [json.loads(line) for line in run(streaming, "grpc", *arguments, "--stream", "--json").stdout.splitlines()]
    assert "".join(chunk["text"] for chunk in chunks) + "\n" == plain.stdout
    assert [chunk["seed"] for chunk in chunks] == [7] * len(chunks)
    assert chunks[-1]["finish_reason"]


@both_protocols
def test_ctrl_c_ends_the_command_and_its_stream(narrow_streaming: LocalTriton, protocol: str) -> None:
    metrics = Metrics(narrow_streaming)
    arguments = ("generate", "def", "--stream", "--max-tokens", "300", "--min-tokens", "300")
    command = [sys.executable, "-c", CODE, *arguments, "--url", url(narrow_streaming, protocol)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        metrics.wait_for_slots(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.strip()) == (1, b"Aborted!")
    metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
