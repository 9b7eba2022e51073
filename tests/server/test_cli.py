"""The command line against a real Triton that runs the real model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields

import pytest
from server.metrics import Metrics
from server.servers import in_use, new_server
from triton_llama import Completion
from triton_local.server import LocalTriton

# A shell's background job would hand down an ignored SIGINT.
CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from triton_llama.cli import main; main()"
)

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def command(server: LocalTriton, protocol: str, *arguments: str) -> list[str]:
    url = f"{protocol}://{server.http_url if protocol == 'http' else server.grpc_url}"
    return [sys.executable, "-W", "error", "-c", CODE, *arguments, "--url", url]


def run(server: LocalTriton, protocol: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of `triton-llama` against this server to its end."""
    line = command(server, protocol, *arguments)
    return subprocess.run(line, input=stdin, capture_output=True, encoding="utf-8", timeout=120, check=False)


def test_stdin_is_completed_without_its_last_line_break(triton: LocalTriton) -> None:
    options = ("--max-tokens", "4", "--exclude-input-in-output", "false", "--json")
    result = run(triton, "http", "generate", *options, stdin="A list\nis\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["text"].startswith("A list\nis")
    assert not json.loads(result.stdout)["text"].startswith("A list\nis\n\n")


def test_json_has_every_field_and_its_seed_repeats_the_text(triton: LocalTriton) -> None:
    arguments = ("generate", "A list", "--max-tokens", "8", "--temperature", "1", "--json")
    first = json.loads(run(triton, "http", *arguments).stdout)
    assert first.keys() == {field.name for field in fields(Completion)}
    again = run(triton, "grpc", *arguments, "--seed", str(first["seed"]))
    assert json.loads(again.stdout)["text"] == first["text"]


@both_protocols
def test_status_shows_how_the_server_computes(triton: LocalTriton, protocol: str) -> None:
    """The server's log names the same computation."""
    metrics = f"--metrics-url={triton.metrics_url}"
    plain = run(triton, protocol, "status", metrics)
    assert plain.returncode == 0
    for expected in ("live, ready", "llama: ready", "preferred 4 8 16 32, delay 10 ms", "quantization = int8"):
        assert expected in plain.stdout
    (computation,) = re.findall(r"^computes    (.*INT8.*); KV cache \w+; on cpu$", plain.stdout, re.MULTILINE)
    assert f"decode steps: {computation}, " in triton.log_text()
    state = json.loads(run(triton, protocol, "status", "--json", metrics).stdout)
    assert state["config"]["preferred_batch_sizes"] == [4, 8, 16, 32]
    assert [instance["computation"] for instance in state["instances"]] == [computation]


@both_protocols
def test_a_missing_model_is_one_line_with_exit_code_7(triton: LocalTriton, protocol: str) -> None:
    shown = run(triton, protocol, "status", "--model", "no-such-model")
    assert shown.returncode == 7
    assert "no-such-model: not ready" in shown.stdout
    refused = run(triton, protocol, "generate", "a", "--model", "no-such-model")
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (7, "", 1)
    assert re.match("Error: .*no-such-model", refused.stderr)


@both_protocols
def test_a_stream_prints_the_same_text_in_chunks(streaming: LocalTriton, protocol: str) -> None:
    arguments = ("generate", "É The for statement", "--max-tokens", "20", "--temperature", "1", "--seed", "7")
    plain = run(streaming, protocol, *arguments)
    streamed = run(streaming, protocol, *arguments, "--stream")
    assert (streamed.returncode, streamed.stderr, streamed.stdout) == (0, "", plain.stdout)
    lines = run(streaming, protocol, *arguments, "--stream", "--json").stdout.splitlines()
    chunks = [json.loads(line) for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) + "\n" == plain.stdout
    assert [chunk["seed"] for chunk in chunks] == [7] * len(chunks)
    assert chunks[-1]["finish_reason"]


@both_protocols
def test_a_receipt_is_verified_by_other_servers(
    triton: LocalTriton, streaming: LocalTriton, batched_int8: LocalTriton, protocol: str
) -> None:
    arguments = ("A list", "--max-tokens", "20", "--temperature", "1", "--seed", "7", "--receipt", "true", "--json")
    answer = run(streaming, protocol, "generate", *arguments).stdout
    assert json.loads(answer)["receipt"] == json.loads(run(triton, protocol, "generate", *arguments).stdout)["receipt"]
    for server in (triton, streaming, batched_int8):
        verified = run(server, protocol, "verify", "-", stdin=answer)
        assert (verified.returncode, verified.stdout, verified.stderr) == (0, "equal, 20 tokens (length)\n", "")


@both_protocols
def test_a_tampered_receipt_is_told_apart(streaming: LocalTriton, protocol: str) -> None:
    arguments = ("A list", "--max-tokens", "20", "--receipt", "true", "--json")
    receipt = json.loads(json.loads(run(streaming, protocol, "generate", *arguments).stdout)["receipt"])
    receipt["output_ids"][5] += 1
    refused = run(streaming, protocol, "verify", "-", stdin=json.dumps(receipt))
    assert (refused.returncode, refused.stdout) == (5, "")
    assert "verify_receipt is an object of the hash" in refused.stderr
    del receipt["hash"]
    text = json.dumps(receipt, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    receipt["hash"] = hashlib.sha256(text.encode()).hexdigest()
    different = run(streaming, protocol, "verify", "-", stdin=json.dumps(receipt))
    assert (different.returncode, different.stderr) == (8, "")
    assert different.stdout.startswith("different after 5 tokens: the receipt has ")


def test_a_server_of_another_setting_refuses_a_receipt(triton: LocalTriton) -> None:
    answer = run(triton, "grpc", "generate", "A list", "--max-tokens", "4", "--receipt", "true", "--json").stdout
    with new_server(environment={"LLAMA_INT8_TERMS": "2"}) as other, in_use("two terms", other):
        for protocol in ("http", "grpc"):
            refused = run(other, protocol, "verify", "-", stdin=answer)
            assert refused.returncode == 5
            assert "a receipt of the 'setting int8_terms' 'auto'; it must be of this server's, '2'" in refused.stderr


@both_protocols
def test_ctrl_c_stops_the_command_and_the_request(narrow_streaming: LocalTriton, protocol: str) -> None:
    metrics = Metrics(narrow_streaming)
    long = ("--max-tokens", "300", "--min-tokens", "300")
    with subprocess.Popen(
        command(narrow_streaming, protocol, "generate", "def", "--stream", *long),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.strip()) == (1, b"Aborted!")
    metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
