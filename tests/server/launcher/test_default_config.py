"""Without --variant a repository is served under its config `streaming`, where every way to ask is open."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from server.fleet import copy_repository
from server.launcher.launching import FREE_PORTS, Launch
from server.servers import HTTP, ROOT
from triton_local.server import LocalTriton

PROMPT = {"text_input": "Return a list of", "max_tokens": 20, "min_tokens": 20}


def _events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line]


@pytest.mark.long
def test_by_default_infer_generate_streams_and_streamed_chats_are_answered(launch: Launch, tmp_path: Path) -> None:
    copy = copy_repository(tmp_path / "repository")
    launcher = launch(*FREE_PORTS, "--openai-port=0", f"--model-repository={copy}", OMP_NUM_THREADS="1")
    facts = launcher.facts()
    assert facts["variant"] == "streaming"
    models = f"http://{facts['http']}/v2/models"
    assert HTTP.post(f"{models}/llama/generate", json=PROMPT).json()["num_output_tokens"] == 20
    streamed = HTTP.post(f"{models}/llama/generate_stream", json={**PROMPT, "stream": True})
    deltas = [json.loads(event) for event in _events(streamed.text)]
    assert len(deltas) > 1
    assert sum(delta["num_output_tokens"] for delta in deltas) == 20
    prompt = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [PROMPT["text_input"]]}
    answer = HTTP.post(f"{models}/llama_unary/infer", json={"inputs": [prompt]}).json()
    assert any(output["name"] == "text_output" and output["data"][0] for output in answer["outputs"])
    chat = {"model": "pydoc-llama", "messages": [{"role": "user", "content": "What is a list?"}], "stream": True}
    events = _events(HTTP.post(f"http://{facts['openai']}/v1/chat/completions", json=chat).text)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"]
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.ends(within=60)[0] == 0


def test_the_default_is_config_pbtxt_where_there_is_no_config_streaming(repository: Path) -> None:
    assert LocalTriton(model_repository=repository).variant == "default"
    assert LocalTriton(model_repository=ROOT / "model_repository").variant == "streaming"
