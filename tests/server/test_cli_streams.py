"""The command line's streams against a real Triton: `generate --stream`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial

import pytest
from server.client_command import CODE, COMMAND, run, url
from server.clients import at_once
from server.metrics import Metrics
from triton_local.server import LocalTriton

# A shell's background job would hand down an ignored SIGINT.
WITH_CTRL_C = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {CODE}"

LONG = ("-n", "300", "--min-tokens", "300")

PROTOCOLS = ("http", "grpc")
both_protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


@both_protocols
def test_the_command_prints_the_same_text_in_chunks(streaming: LocalTriton, protocol: str) -> None:
    arguments = ("generate", "É The for statement", "-n", "20", "-t", "1", "--seed", "7", "--include-prompt")
    plain = run(streaming, protocol, *arguments)
    streamed = run(streaming, protocol, *arguments, "--stream")
    assert (streamed.returncode, streamed.stderr, streamed.stdout) == (0, "", plain.stdout)
    lines = run(streaming, protocol, *arguments, "--stream", "--json").stdout.splitlines()
    chunks = [json.loads(line) for line in lines]
    assert "".join(chunk["text"] for chunk in chunks) + "\n" == plain.stdout
    assert [chunk["seed"] for chunk in chunks] == [7] * len(chunks)
    assert chunks[-1]["finish_reason"]


@both_protocols
def test_ctrl_c_stops_the_command_and_the_request(narrow_streaming: LocalTriton, protocol: str) -> None:
    metrics = Metrics(narrow_streaming)
    with subprocess.Popen(
        [*COMMAND, WITH_CTRL_C, "generate", "def", "--stream", *LONG, "--url", url(narrow_streaming, protocol)],
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
    for result in at_once([partial(run, triton, protocol, "generate", "def", "--stream") for protocol in PROTOCOLS]):
        assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (7, "", 1), result.args
        assert "make serve VARIANT=streaming" in result.stderr
