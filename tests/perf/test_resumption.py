"""Processes die and drain under load, and every client gets the answer of the quiet run, byte for byte.

Real tritonservers under their supervisors, Envoy, and the endpoint's own process. `make resumption` is the long form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from end_to_end.metrics import level
from end_to_end.servers import EMBEDDED, until
from triton_local.openai_endpoint import OpenAIEndpoint

from perf.load.records import Record
from perf.resumption.__main__ import load, resumptions
from perf.resumption.answers import compare, content
from perf.resumption.tritons import RestartedTriton, in_front_of, running_tritons
from perf.resumption.workload import mixed

COUNT = 12
"""Requests of each protocol."""
RUNNING = 4
"""Sequences that a server decodes at least when it dies."""


def _wait_until_it_decodes(server: RestartedTriton) -> None:
    def decodes() -> bool:
        return level(server.local, "llama_slots_in_use") >= RUNNING

    until(decodes, lambda: f"{server.local.grpc_address} runs {RUNNING} sequences")


def _kill(server: RestartedTriton, name: str) -> None:
    _wait_until_it_decodes(server)
    server.kill(name)


def test_answers_survive_deaths_and_a_rolling_restart_of_tritons() -> None:
    """One tritonserver and another one's model process are killed; then each in turn drains and is replaced."""
    requests = mixed(EMBEDDED, COUNT)
    with (
        running_tritons(2, EMBEDDED) as tritons,
        OpenAIEndpoint("127.0.0.1", 0, 30) as endpoint,
        in_front_of(tritons, endpoint) as url,
    ):
        quiet = load(url, endpoint.served_name, requests, lambda: False)
        before = resumptions(endpoint)

        def disturb() -> None:
            with ThreadPoolExecutor() as threads:
                list(threads.map(_kill, tritons, ("tritonserver", "llama")))
            for triton in tritons:
                _wait_until_it_decodes(triton)
                triton.restart()

        with ThreadPoolExecutor() as threads:
            disturbing = threads.submit(disturb)
            answers = load(url, endpoint.served_name, requests, lambda: not disturbing.done())
            disturbing.result()
        assert compare(quiet, answers) == ([], [])
        grown = resumptions(endpoint) - before
    assert grown["given_up"] == 0
    # Some of those that ran may have ended since the metrics were written.
    assert grown.total() > 0


USAGE: Mapping[str, Any] = {
    "choices": [],
    "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
}


def _record(*objects: Mapping[str, Any], error: str = "") -> Record:
    return Record(0.0, error=error, answer=objects)


def _event(text: str, index: int = 0, reason: str | None = None) -> Mapping[str, Any]:
    choice = {"index": index, "delta": {"content": text}, "logprobs": {"content": [{"token": text}]}}
    return {"id": text, "created": 5, "choices": [{**choice, "finish_reason": reason}], "usage": None}


def test_a_stream_is_read_the_same_however_its_text_is_cut() -> None:
    whole = json.loads(content(_record(_event("ab", 1), _event("c", 1, "stop"), _event("d", 0, "length"), USAGE)))
    assert [choice["delta"]["content"] for choice in whole["choices"]] == ["d", "abc"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop"]
    assert whole["choices"][1]["logprobs"]["content"] == [{"token": "ab"}, {"token": "c"}]
    cut = _record(_event("d", 0, "length"), _event("ab", 1), _event("c", 1), _event("", 1, "stop"), USAGE)
    assert json.loads(content(cut))["choices"][1]["delta"] == whole["choices"][1]["delta"]


def test_the_pieces_of_a_calls_arguments_are_joined() -> None:
    deltas = [{"tool_calls": [{"index": 0, "id": "x", "function": {"name": "make", "arguments": "{"}}]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    (choice,) = json.loads(content(_record(*events, USAGE)))["choices"]
    assert choice["delta"]["tool_calls"] == [{"index": 0, "function": {"name": "make", "arguments": "{}"}}]


def test_an_answer_is_read_without_what_its_run_determines() -> None:
    body = {"id": "a", "created": 1, "model": "m", **USAGE}
    body["choices"] = [{"index": 0, "message": {"tool_calls": [{"id": "b", "function": {"arguments": "{}"}}]}}]
    whole = json.loads(content(_record(body)))
    assert (whole.keys(), whole["usage"]) == ({"model", "choices", "usage"}, {"completion_tokens": 3})
    assert "id" not in whole["choices"][0]["message"]["tool_calls"][0]


def test_answers_that_fail_or_differ_are_counted() -> None:
    one, other = (_record(_event(text), USAGE) for text in "ab")
    records = [one, other, _record(error="gone"), one]
    errors, different = compare({"openai_chat": [one, one]}, {"openai_chat": records})
    assert errors == ["openai_chat 2: gone"]
    assert [line[:18] for line in different] == ["openai_chat 1: at "]
