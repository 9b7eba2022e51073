"""Adapters loaded and unloaded by requests while others are computed."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from adapter_files import damage, write_adapter
from engine.backend_utils import Request, request_reader, text
from engine.prompts import request_of
from engine.scheduling import SECONDS, Running, running, until
from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence
from llama_engine.model.loader import LoadedModel
from llama_engine.observability.metrics import LOADED_ADAPTERS
from llama_engine.request.parser import RequestParser
from llama_engine.triton.adapter_commands import MAX_RUNNING, AdapterCommands
from llama_engine.triton.request_reader import RequestReader


@dataclass
class Served:
    """A scheduler with a reader of requests, as model.py has them."""

    running: Running
    reader: RequestReader
    commands: AdapterCommands
    checkpoint: LoadedModel

    def ask(self, **inputs: str) -> Request:
        """Decode a request and start its command."""
        request = Request("", **{name: text(value) for name, value in inputs.items()})
        responder = self.reader.read(cast(Any, request))
        self.running.scheduler.add(responder.sequences)
        self.commands.start()
        return request

    def answer(self, request: Request) -> Any:  # noqa: ANN401 - an error's text, or JSON
        """Wait for the answer to a command or a refused request, and return it."""
        until(lambda: request.sent)
        ((response, final),) = request.sent
        assert final
        return str(response.error) if response.error else json.loads(response.values()["text_output"][0])

    def start(self, name: str) -> Sequence:
        """Start a sequence of an adapter, which is held at its first forward pass."""
        (adapter,) = (each for each in self.running.engine.adapters.loaded() if each.name == name)
        (sequence,) = self.running.add(replace(request_of(self.checkpoint, 1, 20, 4), adapter=adapter))
        return sequence


@pytest.fixture
def served(fp32: LoadedModel, tmp_path: Path) -> Iterator[Served]:
    write_adapter(tmp_path / "a", 0)
    damage(write_adapter(tmp_path / "bad", 1))
    with running(fp32, 4, lora_folder=str(tmp_path), max_loras="2") as parts, _serving(parts, tmp_path, fp32) as served:
        assert [each["name"] for each in served.answer(served.ask(lora_name="a", lora_path="a"))] == ["a"]
        yield served


@contextmanager
def _serving(parts: Running, folder: Path, checkpoint: LoadedModel) -> Iterator[Served]:
    engine = parts.engine
    commands = AdapterCommands(engine.adapters, str(folder), parts.scheduler, parts.dispatcher, parts.stats)
    parser = RequestParser(engine.tokenizer, engine.defaults, engine.max_model_len, adapters=engine.adapters.loaded)
    reader = request_reader(engine, parser, "none", parts.stats, parts.dispatcher, commands.add)
    yield Served(parts, reader, commands, checkpoint)
    # Otherwise `stop` would wait for a held step.
    parts.pace.run_free()
    parts.scheduler.stop(0)
    commands.close(SECONDS)


def test_an_adapter_can_be_loaded_while_another_waits_to_be_unloaded(served: Served) -> None:
    served.start("a")
    unload = served.ask(lora_name="a", lora_path="")
    (again,) = served.answer(served.ask(lora_name="again", lora_path="a"))
    assert (again["number"], again["rank"]) == (0, 4)
    assert not unload.sent


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"lora_name": "bad", "lora_path": "bad"}, "INVALID_ARG: lora_path is 'bad': can't load bad: adapter_m"),
        ({"lora_name": "x", "lora_path": "../x"}, "INVALID_ARG: lora_path is '../x'; it must be a folder inside"),
        ({"lora_name": "x", "lora_path": ""}, "INVALID_ARG: lora_name is 'x'; it must be a loaded adapter's: a"),
    ],
)
def test_a_bad_command_is_refused_and_others_go_on(served: Served, inputs: dict[str, str], message: str) -> None:
    sequence = served.start("a")
    refusal = served.answer(served.ask(**inputs))
    assert refusal.startswith(message)
    assert "\n" not in refusal
    assert isinstance(served.running.finish([sequence])[0], Completion)


def test_a_failure_is_answered_without_its_detail(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.running.engine._model.loras, "load", Mock(side_effect=MemoryError("secret")))
    answer = served.answer(served.ask(lora_name="b", lora_path="a"))
    assert answer.startswith("INTERNAL: the adapter could not be loaded")
    assert [adapter.name for adapter in served.running.engine.adapters.loaded()] == ["a"]


def test_a_waiting_unload_ends_with_the_scheduler(served: Served) -> None:
    served.start("a")
    unload = served.ask(lora_name="a", lora_path="")
    stopping = threading.Thread(target=served.running.scheduler.stop, args=(SECONDS,))
    stopping.start()
    # Its sequence is still held.
    assert served.answer(unload) == "STOPPING: the server is stopping"
    served.running.pace.run_free()
    stopping.join(SECONDS)


@pytest.fixture
def held(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Loads that wait in the model runner until the event is set."""
    event = threading.Event()
    monkeypatch.setattr(served.running.engine._model.loras, "load", lambda *_: event.wait(SECONDS))
    yield event
    event.set()


def test_running_and_waiting_loads_are_answered_once_at_shutdown(served: Served, held: threading.Event) -> None:
    loads = [served.ask(lora_name=name, lora_path="a") for name in ("b", "c")]
    served.commands.close(0.1)
    held.set()
    served.commands.close(SECONDS)
    assert [served.answer(load) for load in loads] == ["STOPPING: the server is stopping"] * 2


def test_too_many_running_commands_are_refused(served: Served, held: threading.Event) -> None:
    for index in range(MAX_RUNNING):
        served.ask(lora_name=f"b{index}", lora_path="a")
    assert served.answer(served.ask(lora_name="a", lora_path="")).startswith("QUEUE_FULL: 16 requests with lora_path")
    assert [adapter.name for adapter in served.running.engine.adapters.loaded()] == ["a"]
    held.set()


def test_a_command_without_a_thread_fails_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        unload = served.ask(lora_name="a", lora_path="")
    assert served.answer(unload).startswith("INTERNAL: the adapter could not be")
    assert served.answer(served.ask(lora_name="a", lora_path="")) == []


def test_commands_are_refused_where_the_setting_is_off(served: Served) -> None:
    parts = served.running
    commands = AdapterCommands(parts.engine.adapters, "", parts.scheduler, parts.dispatcher, parts.stats)
    off = replace(served.reader, add_command=commands.add)
    request = Request("", lora_name=text("a"), lora_path=text("a"))
    off.read(cast(Any, request))
    assert "lora_path is given; it must be missing: the setting lora_folder is off" in served.answer(request)


def test_commands_are_refused_under_scheduling_batch(served: Served) -> None:
    batch = replace(served.reader, inflight=False)
    responder = batch.read(cast(Any, Request("", lora_name=text("a"), lora_path=text("a"))))
    assert "lora_path is given; it must be missing under scheduling 'batch'" in str(responder.error)


def test_the_gauge_counts_the_loaded_adapters(served: Served) -> None:
    served.running.stats.close(SECONDS)
    assert served.running.registry.levels[LOADED_ADAPTERS.name] == 1
