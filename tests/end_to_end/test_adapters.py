"""LoRA adapters, loaded and unloaded while a real Triton answers, and resumed when it dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from adapter_files import damage, write_adapter
from end_to_end.openai_endpoint import in_front_of
from end_to_end.plans import copy_repository
from end_to_end.servers import TIMEOUT_S, model_process, new_server, ports_of, until
from end_to_end.streams import events, sse_response
from end_to_end.wires import UNARY, Answer, Refusal, generate, grpc, post
from frontend.endpoints import Endpoint, resumptions_of
from triton_local.server import LocalTriton

PROMPT = {"text_input": "def factorial(n):", "max_tokens": 8, "min_tokens": 8, "temperature": 0.0}
LONG = {**PROMPT, "max_tokens": 100, "min_tokens": 100}
"""A second of steps."""


@pytest.fixture(scope="module")
def adapted(ending: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTriton]:
    """A slow streaming server with the adapter `start`, number 7, and the folders b and bad of others."""
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("start", "b", "bad")):
        write_adapter(folder / name, seed)
    damage(folder / "bad")
    environment = {"LLAMA_LORA_ADAPTERS": f"start:7={folder / 'start'}", "LLAMA_LORA_FOLDER": str(folder)}
    repository = copy_repository(tmp_path_factory.mktemp("adapted"), "slow_model")
    server = ending.enter_context(new_server("streaming", environment, repository))
    yield server
    server.terminate()


def _texts(answers: list[Answer] | Refusal) -> list[str]:
    assert not isinstance(answers, Refusal), answers.message
    return [answer.text for answer in answers]


def _refused(answers: list[Answer] | Refusal) -> str:
    assert isinstance(answers, Refusal)
    return answers.message


def _command(server: LocalTriton, name: str, path: str) -> Any:  # noqa: ANN401 - an error's text, or JSON
    """Load or unload an adapter; return the error, or the names of the loaded ones."""
    body = post(server, "generate", {"lora_name": name, "lora_path": path}).json()
    return body["error"] if "error" in body else [each["name"] for each in json.loads(body["text_output"])]


def test_a_name_and_its_number_are_one_adapter_on_each_wire(adapted: LocalTriton) -> None:
    base = _texts(generate(adapted, PROMPT))
    named = _texts(generate(adapted, {**PROMPT, "lora_name": "start"}))
    assert named != base
    assert named == _texts(generate(adapted, {**PROMPT, "lora_task_id": 7}))
    assert named == _texts(grpc(adapted, {**PROMPT, "lora_task_id": 7}, model=UNARY))


def test_an_adapter_answers_from_its_loading_to_its_unloading(adapted: LocalTriton) -> None:
    request = {**PROMPT, "lora_name": "b"}
    assert "lora_name is 'b'; it must be one of start" in _refused(generate(adapted, request))
    assert _command(adapted, "b", "b") == ["start", "b"]
    text = _texts(generate(adapted, request))
    assert text != _texts(generate(adapted, PROMPT))
    assert _command(adapted, "b", "") == ["start"]
    assert "lora_name is 'b'" in _refused(generate(adapted, request))
    assert _command(adapted, "b", "b") == ["start", "b"]
    assert _texts(generate(adapted, request)) == text
    assert _command(adapted, "b", "") == ["start"]


def test_an_unload_waits_for_a_stream_and_refuses_new_requests(adapted: LocalTriton) -> None:
    assert _command(adapted, "streamed", "b") == ["start", "streamed"]
    # Four seconds of steps: drafts could shorten a greedy text.
    lasting = {**LONG, "max_tokens": 400, "min_tokens": 400, "temperature": 2.0, "lora_name": "streamed"}
    with ThreadPoolExecutor() as threads, sse_response(adapted, lasting) as response:
        chunks = events(response)
        first = next(chunks)
        unload = threads.submit(_command, adapted, "streamed", "")
        while "lora_name is 'streamed'" not in str(generate(adapted, {**PROMPT, "lora_name": "streamed"})):
            assert not unload.done()
        waits = not unload.done()
        rest = list(chunks)
        assert unload.result() == ["start"]
    assert waits
    assert sum(chunk["num_output_tokens"] for chunk in (first, *rest)) == 400


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("bad", "INVALID_ARG: lora_path is 'bad': "),
        ("../", "INVALID_ARG: lora_path is '../'; it must be a folder inside the setting lora_folder"),
    ],
)
def test_a_bad_adapter_is_refused_and_a_stream_goes_on(adapted: LocalTriton, path: str, message: str) -> None:
    alone = _texts(generate(adapted, {**LONG, "lora_name": "start"}))
    with sse_response(adapted, {**LONG, "lora_name": "start"}) as response:
        chunks = events(response)
        text = next(chunks)["text_output"]
        assert message in _command(adapted, "x", path)
        assert [text + "".join(chunk["text_output"] for chunk in chunks)] == alone


def _completion(served: Endpoint, model: str, begun: Barrier) -> str:
    """Stream two seconds of steps, and meet the others at the barrier after the first chunk; return the text."""
    body = {"model": model, "prompt": "def", "max_tokens": 200, "ignore_eos": True, "seed": 1, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        chunks = [json.loads(next(lines))]
        begun.wait(TIMEOUT_S)
        chunks += [json.loads(line) for line in lines if line != "[DONE]"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_streams_of_adapters_go_on_after_the_models_death(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, seed)
    # Drafts of the undisturbed texts would end the streams before the model dies.
    environment = {"LLAMA_LORA_ADAPTERS": f"a={tmp_path / 'a'}, b={tmp_path / 'b'}", "LLAMA_SPECULATION": "off"}
    repository, models = copy_repository(tmp_path, "slow_model"), ("pydoc-llama", "a", "b")
    with (
        new_server("streaming", environment, repository) as server,
        # A server's start may take a minute on a busy machine.
        in_front_of(server, resume_timeout=240) as served,
        ThreadPoolExecutor() as threads,
    ):
        quiet = [_completion(served, model, Barrier(1)) for model in models]
        begun = Barrier(len(models), model_process(server).kill)
        completions = [threads.submit(_completion, served, model, begun) for model in models]
        until(lambda: server.exit_code is not None, lambda: "the server ends")
        server.stop()
        with new_server("streaming", environment, repository, ports=ports_of(server)):
            assert [completion.result() for completion in completions] == quiet
        assert len({*quiet}) == len(quiet)
        # Counted a moment after the end of an answer.
        until(lambda: resumptions_of(served).get("resumed", 0) >= 3, lambda: "three are counted")
