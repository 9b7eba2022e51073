"""The command line against a real Triton that runs the real model."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from server.client_command import CODE, COMMAND, run
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
def test_a_file_is_completed_in_order_and_one_bad_line_harms_no_other(
    triton: LocalTriton, protocol: str, tmp_path: Path
) -> None:
    prompts = [f"Statement number {number}" for number in range(20)]
    entries: list[dict[str, object]] = [{"prompt": prompt, "max_tokens": 2} for prompt in prompts]
    entries[7]["temperature"] = 9.0
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    output = tmp_path / "out.jsonl"
    files = ("--prompts-file", str(file), "--output", str(output))
    result = run(triton, protocol, "generate", *files, "--json", "--include-prompt", "--concurrency", "6")
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (5, "", 1)
    assert result.stderr.startswith("triton-llama: error: line 8: ")
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [answer["line"] for answer in answers] == list(range(1, 21))
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer["line"] == 8:
            assert answer["error"]["type"] == "RejectedInputError"
            assert "temperature" in answer["error"]["message"]
        else:
            assert answer["text"].startswith(prompt)


def test_plain_output_has_one_line_a_prompt_and_the_bar_stays_off_it(triton: LocalTriton, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\nsecond\nthird\n")
    result = run(triton, "http", "generate", "--prompts-file", str(file), "-n", "8", "--include-prompt", "--progress")
    assert result.returncode == 0
    assert [line.split()[0][:5] for line in result.stdout.splitlines()] == ["first", "secon", "third"]
    assert "3/3" in result.stderr


def test_the_reader_may_leave_before_the_end(triton: LocalTriton, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a prompt\n" * 40)
    with subprocess.Popen(
        [*COMMAND, CODE, "generate", "--prompts-file", str(file), "-n", "1", "--url", triton.http_url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


@both_protocols
def test_status_shows_server_model_config_and_how_the_model_computes(triton: LocalTriton, protocol: str) -> None:
    """The server's log names the same computation."""
    metrics = f"--metrics-url={triton.metrics_url}"
    plain = run(triton, protocol, "status", metrics)
    assert plain.returncode == 0
    for expected in ("live, ready", "llama: ready", "preferred 4 8 16 32, delay 10 ms", "quantization = int8"):
        assert expected in plain.stdout
    (computation,) = re.findall(r"^computes    (.*INT8.*); KV cache \w+; on cpu$", plain.stdout, re.MULTILINE)
    assert f"decode steps: {computation}, " in triton.log_text()
    found = json.loads(run(triton, protocol, "status", "--json", metrics).stdout)
    assert found["config"]["preferred_batch_sizes"] == [4, 8, 16, 32]
    assert [instance["computation"] for instance in found["instances"]] == [computation]


def test_status_without_metrics_says_so_and_shows_the_rest(triton: LocalTriton) -> None:
    plain = run(triton, "http", "status", "--metrics-url", "127.0.0.1:1")
    assert plain.returncode == 0
    assert "computes    unknown: 127.0.0.1:1 has no metrics: " in plain.stdout
    assert "llama: ready" in plain.stdout


@both_protocols
def test_a_model_that_is_not_there_is_shown_and_requests_for_it_are_one_line_and_exit_code_7(
    triton: LocalTriton, protocol: str
) -> None:
    shown = run(triton, protocol, "status", "--model", "no-such-model")
    assert shown.returncode == 7
    assert "no-such-model: not ready" in shown.stdout
    refused = run(triton, protocol, "generate", "a", "--model", "no-such-model")
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (7, "", 1)
    assert re.match("triton-llama: error: .*no-such-model", refused.stderr)
