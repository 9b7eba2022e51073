"""The client library and its command line against a real Triton; tests/client has wrong use and exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from end_to_end.metrics import Metrics
from end_to_end.servers import until
from frontend.endpoints import Endpoint
from triton_llama import (
    AsyncLlamaClient,
    Completion,
    LlamaClient,
    LlamaTimeoutError,
    RejectedInputError,
    SamplingParams,
)
from triton_llama.address import Protocol
from triton_llama.cli import main
from triton_local.server import LocalTriton

PROMPTS = ["The for statement is used to", "Return a list of", "É 🙂 x", "def ", "An exception", "A", "In Python", "x"]
REQUESTS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=2**64 - 1),
    SamplingParams(max_tokens=40, temperature=1.3, seed=9223372036854775809, stop_words=["e", "the "]),
    SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, seed=5, bad_words=[" the"], exclude_input_in_output=False),
]

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def url(server: LocalTriton, protocol: Protocol) -> str:
    return f"{protocol}://{server.http_address if protocol == 'http' else server.grpc_address}"


@both_protocols
def test_a_refusal_or_a_timeout_harms_no_later_request(streaming: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(url(streaming, protocol), protocol) as client:
        with pytest.raises(RejectedInputError, match="temperature"):
            client.generate(PROMPTS[0], temperature=7.0)
        with pytest.raises(LlamaTimeoutError):
            client.generate(PROMPTS[0], max_tokens=500, min_tokens=500, timeout=0.001)
        times = client.generate(PROMPTS[0], max_tokens=2, return_perf_metrics=True).times
    assert times is not None
    assert times.arrival <= times.first_scheduled <= times.first_token <= times.last_token


@both_protocols
async def test_an_async_client_goes_on_after_a_cancelled_task(triton: LocalTriton, protocol: Protocol) -> None:
    async with AsyncLlamaClient(url(triton, protocol), protocol) as client:
        task = asyncio.create_task(client.generate(PROMPTS[0], max_tokens=64))
        for _ in range(3):
            # Let it get as far as the socket; no answer is that quick.
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        params = SamplingParams(max_tokens=4, exclude_input_in_output=False)
        completions = await asyncio.gather(*(client.generate(prompt, params) for prompt in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.text.startswith(prompt)
        assert 1 <= completion.num_output_tokens <= 4


@both_protocols
def test_chunks_joined_in_eight_threads_are_what_generate_gives(streaming: LocalTriton, protocol: Protocol) -> None:
    with LlamaClient(url(streaming, protocol), protocol) as client, ThreadPoolExecutor(8) as threads:

        def check(prompt: str, params: SamplingParams) -> None:
            with client.stream(prompt, params) as stream:
                chunks = list(stream)
            streamed, whole = stream.completion, client.generate(prompt, params)
            assert stream.text == "".join(chunk.text for chunk in chunks)
            assert [bool(chunk.finish_reason) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            # Drafts of the second answer can be taken from the first.
            own = ("request_id", "seed", "num_accepted_draft_tokens", "num_rejected_draft_tokens")
            assert streamed == replace(whole, **{name: getattr(streamed, name) for name in own})

        list(threads.map(check, PROMPTS, REQUESTS * 2))


# A shell's background job would hand down an ignored SIGINT.
CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from triton_llama.cli import main; main()"
)


def run(server: LocalTriton, protocol: Protocol, *arguments: str, stdin: str = "") -> Result:
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


def test_status_shows_how_the_server_computes_and_guesses(triton: LocalTriton) -> None:
    """The server's log names the same computation."""
    status = ("status", f"--metrics-url={triton.metrics_address}")

    def read() -> dict[str, Any]:
        state: dict[str, Any] = json.loads(run(triton, "grpc", *status, "--json").stdout)
        return state

    # The second answer has drafts. Metrics follow the answers.
    for _ in range(2):
        run(triton, "http", "generate", "A list", "--max-tokens", "16", "--temperature", "0")
    until(lambda: bool(read()["drafts"]), lambda: "guesses are counted")
    plain = run(triton, "http", *status)
    assert plain.exit_code == 0
    for expected in ("live, ready", "llama: ready", "preferred 4 8 16 32, delay 1 ms", "quantization = int8"):
        assert expected in plain.stdout
    assert re.search(r"^outliers    columns with two terms: .*down \d+\.\d%", plain.stdout, re.MULTILINE)
    assert re.search(r"^KV cache    \d+ of \d+ pages used, \d+ hold .* were cached$", plain.stdout, re.MULTILINE)
    (computation,) = re.findall(r"^computes    (.*INT8.*); KV cache \w+; on cpu$", plain.stdout, re.MULTILINE)
    assert f"decode steps: {computation}, " in triton.log_text()
    state = read()
    assert state["url"] == url(triton, "grpc")
    guesses = [f"{source} {counts['right']} of {counts['guessed']}" for source, counts in state["drafts"].items()]
    assert f"drafts      right guesses: {', '.join(guesses)}\n" in plain.stdout
    config = state["config"]
    assert (config["preferred_batch_sizes"], config["max_queue_delay_microseconds"]) == ([4, 8, 16, 32], 1000)
    assert [instance["computation"] for instance in state["instances"]] == [computation]


@both_protocols
def test_a_missing_model_is_one_line_with_exit_code_7(triton: LocalTriton, protocol: Protocol) -> None:
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
def test_ctrl_c_ends_the_command_and_its_stream(narrow_streaming: LocalTriton, protocol: Protocol) -> None:
    metrics = Metrics(narrow_streaming)
    arguments = ("generate", "def", "--stream", "--max-tokens", "300", "--min-tokens", "300")
    command = [sys.executable, "-c", CODE, *arguments, "--url", url(narrow_streaming, protocol)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        metrics.wait_for_slots(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.strip()) == (1, b"Aborted!")
    metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")


LINES = 90


def _line(number: int) -> str:
    body = {"prompt": f"The module number {number}", "max_tokens": 4 + number % 13, "temperature": number % 2}
    line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return f"{json.dumps(line)}\n"


def _start(endpoint: Endpoint, source: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from triton_llama.cli import main; main()", "run-batch", str(source), str(out)]
    return subprocess.Popen([*command, "--url", endpoint.base_url, "--seed", "7", *options])


def _count(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def _answers(out: Path) -> dict[str, object]:
    """Return choices and usage by custom_id, of which each is there once."""
    answers: dict[str, object] = {}
    for line in map(json.loads, out.read_text().splitlines()):
        assert line["custom_id"] not in answers
        body = line["response"]["body"]
        # What was cached depends on the other requests.
        usage = {name: count for name, count in body["usage"].items() if not name.endswith("_details")}
        answers[line["custom_id"]] = (body["choices"], usage)
    return answers


def test_a_killed_batch_has_each_answer_once_as_a_quiet_run_has_it(served: Endpoint, tmp_path: Path) -> None:
    source, quiet, out = (tmp_path / f"{name}.jsonl" for name in ("in", "quiet", "out"))
    source.write_text("".join(map(_line, range(LINES))))
    assert _start(served, source, quiet, "--concurrency", "1").wait(120) == 0
    for killed_at in (LINES // 6, LINES // 3):
        with _start(served, source, out, "--resume") as process:
            until(lambda at=killed_at: _count(out) >= at, lambda: "lines are answered")  # type: ignore[misc]
            process.kill()
            assert process.wait() == -signal.SIGKILL
    assert _start(served, source, out, "--resume").wait(120) == 0
    assert _answers(out) == _answers(quiet)
    assert len(_answers(out)) == LINES
