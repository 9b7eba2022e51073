"""The command line against a real Triton that runs the real model."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
from server.client_command import run
from triton_llama import Completion
from triton_local.server import LocalTriton

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def test_stdin_is_completed_without_its_last_line_break(triton: LocalTriton) -> None:
    result = run(triton, "http", "generate", "-n", "4", "--json", "--include-prompt", stdin="A list\nis\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["text"].startswith("A list\nis")
    assert not json.loads(result.stdout)["text"].startswith("A list\nis\n\n")


def test_json_has_every_field_and_its_seed_repeats_the_text(triton: LocalTriton) -> None:
    arguments = ("generate", "A list", "-n", "8", "-t", "1", "--json")
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


def test_status_without_metrics_says_so_and_shows_the_rest(triton: LocalTriton) -> None:
    plain = run(triton, "http", "status", "--metrics-url", "127.0.0.1:1")
    assert plain.returncode == 0
    assert "computes    unknown: 127.0.0.1:1 has no metrics: " in plain.stdout
    assert "llama: ready" in plain.stdout


@both_protocols
def test_a_missing_model_is_one_line_with_exit_code_7(triton: LocalTriton, protocol: str) -> None:
    shown = run(triton, protocol, "status", "--model", "no-such-model")
    assert shown.returncode == 7
    assert "no-such-model: not ready" in shown.stdout
    refused = run(triton, protocol, "generate", "a", "--model", "no-such-model")
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (7, "", 1)
    assert re.match("triton-llama: error: .*no-such-model", refused.stderr)
