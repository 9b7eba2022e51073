"""`triton-llama run-batch` in front of a real Triton: killed, and beside chats."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from end_to_end.metrics import Metrics
from end_to_end.openai_endpoint import in_front_of
from end_to_end.servers import until
from frontend.endpoints import Endpoint
from triton_local.server import LocalTriton

Json = dict[str, Any]

LINES = 90
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def _line(number: int, **fields: object) -> Json:
    text, url = f"The module number {number}", URLS[number % len(URLS)]
    bodies: list[Json] = [{"messages": [{"role": "user", "content": text}]}, {"prompt": text}, {"input": text}]
    length = "max_output_tokens" if url == "/v1/responses" else "max_tokens"
    body = {length: 4 + number % 13, "temperature": number % 2, **fields} | bodies[URLS.index(url)]
    return {"custom_id": f"{number}", "method": "POST", "url": url, "body": body}


def _start(endpoint: Endpoint, source: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from triton_llama.cli import main; main()", "run-batch", str(source), str(out)]
    return subprocess.Popen([*command, "--url", endpoint.base_url, "--seed", "7", *options])


def _count(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def _answers(out: Path) -> dict[str, object]:
    """Return choices or output, and usage, by custom_id, of which each is there once."""
    answers: dict[str, object] = {}
    for line in map(json.loads, out.read_text().splitlines()):
        assert line["custom_id"] not in answers
        body = line["response"]["body"]
        texts = [item["content"] for item in body["output"]] if "output" in body else body["choices"]
        # What was cached depends on the other requests.
        usage = {name: count for name, count in body["usage"].items() if not name.endswith("_details")}
        answers[line["custom_id"]] = (texts, usage)
    return answers


def test_a_killed_batch_has_each_answer_once_as_a_quiet_run_has_it(served: Endpoint, tmp_path: Path) -> None:
    source, quiet, out = (tmp_path / f"{name}.jsonl" for name in ("in", "quiet", "out"))
    source.write_text("".join(f"{json.dumps(_line(number))}\n" for number in range(LINES)))
    assert _start(served, source, quiet, "--concurrency", "1").wait(120) == 0
    for killed_at in (LINES // 6, LINES // 3):
        with _start(served, source, out, "--resume") as process:
            until(lambda at=killed_at: _count(out) >= at, lambda: "lines are answered")  # type: ignore[misc]
            process.kill()
            assert process.wait() == -signal.SIGKILL
    assert _start(served, source, out, "--resume").wait(120) == 0
    assert _answers(out) == _answers(quiet)
    assert len(_answers(out)) == LINES


def test_a_chat_waits_for_a_running_line_and_for_no_later_one(narrow_streaming: LocalTriton, tmp_path: Path) -> None:
    source, out, slots = tmp_path / "in.jsonl", tmp_path / "out.jsonl", 2
    lines = [_line(number, max_tokens=400, ignore_eos=True, temperature=2) for number in range(1, 24, 3)]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    metrics = Metrics(narrow_streaming)
    options = ("--concurrency", f"{slots}")
    with in_front_of(narrow_streaming) as endpoint, _start(endpoint, source, out, *options) as process:
        metrics.wait_for_slots(slots)
        assert endpoint.chat(max_tokens=1).status_code == 200
        assert _count(out) <= slots
        process.terminate()
