"""LoRA adapters, loaded and unloaded while a real Triton answers, and resumed when it dies.

What is refused, and that others go on, is tested in tests/engine/test_adapter_commands.py. The last test kills the
server that the others share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from adapter_files import write_adapter
from end_to_end.plans import copy_repository
from end_to_end.servers import TIMEOUT_S, in_front_of, model_process, new_server, ports_of, until
from end_to_end.wires import ask, generate, post
from frontend.endpoints import Endpoint, resumptions_of
from triton_local.server import LocalTriton

PROMPT = {"text_input": "def factorial(n):", "max_tokens": 8, "min_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings with the adapters `start` and `other`, and with the folder of another one, b."""
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("start", "other", "b")):
        write_adapter(folder / name, seed)
    adapters = f"start={folder / 'start'}, other={folder / 'other'}"
    # Drafts of texts that came before would end streams before the model dies.
    return {"LLAMA_LORA_ADAPTERS": adapters, "LLAMA_LORA_FOLDER": str(folder), "LLAMA_SPECULATION": "off"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_repository(tmp_path_factory.mktemp("adapted"), "slow_model")


@pytest.fixture(scope="module")
def adapted(ending: ExitStack, environment: dict[str, str], repository: Path) -> Iterator[LocalTriton]:
    """A slow streaming server, which the last test kills."""
    server = ending.enter_context(new_server("streaming", environment, repository))
    yield server
    server.terminate()


def _command(server: LocalTriton, name: str, path: str) -> list[str]:
    """Load or unload an adapter; return the names of the loaded ones."""
    body: dict[str, Any] = post(server, "generate", {"lora_name": name, "lora_path": path}).raise_for_status().json()
    return [each["name"] for each in json.loads(body["text_output"])]


def test_an_adapter_answers_from_its_loading_to_its_unloading(adapted: LocalTriton) -> None:
    request = {**PROMPT, "lora_name": "b"}
    assert "lora_name is 'b'; it must be one of start" in str(generate(adapted, request))
    assert _command(adapted, "b", "b") == ["start", "other", "b"]
    assert ask(adapted, generate, **request).text != ask(adapted, generate, **PROMPT).text
    assert _command(adapted, "b", "") == ["start", "other"]
    assert "lora_name is 'b'" in str(generate(adapted, request))


def _completion(served: Endpoint, model: str, begun: Barrier) -> str:
    """Stream two seconds of steps, and meet the others at the barrier after the first chunk; return the text."""
    body = {"model": model, "prompt": "def", "max_tokens": 200, "ignore_eos": True, "seed": 1, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        chunks = [json.loads(next(lines))]
        begun.wait(TIMEOUT_S)
        chunks += [json.loads(line) for line in lines if line != "[DONE]"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_streams_go_on_with_the_same_bytes_after_the_models_death(
    adapted: LocalTriton, environment: dict[str, str], repository: Path
) -> None:
    """Streams of the base model and of adapters."""
    models = ("pydoc-llama", "start", "other")
    # A server's start may take a minute on a busy machine.
    with in_front_of(adapted, resume_timeout=240) as served, ThreadPoolExecutor() as threads:
        quiet = [_completion(served, model, Barrier(1)) for model in models]
        begun = Barrier(len(models), model_process(adapted).kill)
        completions = [threads.submit(_completion, served, model, begun) for model in models]
        until(lambda: adapted.exit_code is not None, lambda: "the server ends")
        adapted.stop()
        with new_server("streaming", environment, repository, ports=ports_of(adapted)):
            assert [completion.result() for completion in completions] == quiet
        assert len({*quiet}) == len(quiet)
        # Counted a moment after the end of an answer.
        until(lambda: resumptions_of(served).get("resumed", 0) >= 3, lambda: "three are counted")
