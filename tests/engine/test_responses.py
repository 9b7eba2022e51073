"""Requests become sequences, and their events responses: rows and choices in order, streams, final flags, errors."""

import json
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from engine.backend_utils import Request, TritonError, reading, text
from engine.engines import engine_of, needs_compiled_kernels
from engine.metrics import RecordingRegistry
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Chunk, Event, ResponseSink
from llama_engine.engine.sequence import Sequence
from llama_engine.errors import Cancelled
from llama_engine.model.loader import LoadedModel
from llama_engine.observability.stats import Stats
from llama_engine.sampling.draw import choice_seed
from llama_engine.triton.request_reader import RequestReader
from llama_engine.triton.responder import Responder
from numpy.typing import NDArray

PROMPT = "Return a list of"
LAST = {"stop_reason", "num_cached_tokens", "num_accepted_draft_tokens", "num_rejected_draft_tokens"}
"""Outputs of the last chunk of a stream."""
ALWAYS = {"text_output", "finish_reason", "num_input_tokens", "num_output_tokens", *LAST}


@pytest.fixture
def reader(int8: LoadedModel) -> Iterator[RequestReader]:
    with reading(engine_of(int8, 4), Stats(RecordingRegistry(), 4), "none") as reader:
        yield reader


def _int32(*rows: int) -> NDArray[np.int32]:
    return np.array([[row] for row in rows], dtype=np.int32)


def _flag(value: bool) -> NDArray[np.bool_]:
    return np.array([[value]])


def _run(engine: Engine, responder: Responder, every: int = 1) -> None:
    """Run a responder's sequences, sending what the scheduler would after every `every` steps."""
    waiting: list[Sequence] = list(responder.sequences)
    inside: list[Sequence] = []
    events: list[Event] = []
    steps = 0
    while waiting or inside:
        while waiting and engine.num_sequences < engine.slots:
            inside.append(waiting.pop(0))
            engine.add(inside[-1])
        engine.step()
        steps += 1
        for sequence in list(inside):
            chunk = sequence.chunk_cutter.next() if sequence.context.stream else None
            events += [] if chunk is None else [chunk]
            if sequence.result is not None:
                events.append(sequence.result)
                inside.remove(sequence)
        if events and (steps % every == 0 or not (waiting or inside)):
            responder.send(events)
            events = []


def _read(reader: RequestReader, request: Request) -> Responder:
    return reader.read(cast(Any, request))


def _answer(reader: RequestReader, request: Request) -> dict[str, list[Any]]:
    """Return the outputs of the only response to a request."""
    _run(reader.engine, _read(reader, request))
    ((response, final),) = request.sent
    assert final
    assert response.error is None
    return response.values()


def test_a_response_has_the_choices_of_each_row_in_order(reader: RequestReader) -> None:
    limits = _int32(3, 5)
    greedy = np.zeros((2, 1), dtype=np.float32)
    inputs = {"max_tokens": limits, "min_tokens": limits, "n": _int32(1, 3), "temperature": greedy}
    request = Request('{"return_output_ids": true}', text_input=text(PROMPT, "class"), **inputs)
    outputs = _answer(reader, request)
    assert set(outputs) == ALWAYS | {"output_ids", "seed"}
    # A choice is resumed alone, with its own seed.
    assert outputs["seed"][1:] == [choice_seed(outputs["seed"][1], choice) for choice in range(3)]
    assert [len(ids) - ids.count(-1) for ids in outputs["output_ids"]] == [3, 5, 5, 5]
    assert outputs["num_output_tokens"] == [3, 5, 5, 5]
    assert outputs["num_input_tokens"][1:] == [outputs["num_input_tokens"][1]] * 3
    # Greedy: the choices are the same text.
    assert len(set(outputs["text_output"][1:])) == 1
    assert outputs["finish_reason"] == ["length"] * 4
    assert outputs["stop_reason"] == [""] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_reports_the_prompt_tokens_that_another_has_computed(reader: RequestReader, stream: bool) -> None:
    salt = text(f"of its own, stream {stream}")
    request = Request(text_input=text(PROMPT), n=_int32(2), max_tokens=_int32(3), cache_salt=salt, stream=_flag(stream))
    request.requested = ["num_cached_tokens", "sequence_index"]
    _run(reader.engine, _read(reader, request))
    counts = [count for response, _ in request.sent for count in response.values().get("num_cached_tokens", [])]
    assert len(counts) == 2
    assert min(counts) == 0 < max(counts)


ALL = {
    "return_output_ids": True, "return_log_probs": True, "num_logprobs": 2, "prompt_logprobs": 1,
    "return_perf_metrics": True,
}  # fmt: skip
OF_TOKENS = ("text_output", "num_output_tokens", "output_ids", "output_log_probs", "logprobs")
"""Outputs of a stream that its chunks have parts of."""


def _joined(chunks: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return the tokens' outputs of a stream's chunks, and the others of its last one."""
    parts = {name: [value for chunk in chunks for value in chunk[name]] for name in OF_TOKENS}
    parts["logprobs"] = [token for part in parts["logprobs"] for token in json.loads(part)]
    for name in ("output_ids", "output_log_probs"):
        parts[name] = [value for part in parts[name] for value in part]
    ends = ("finish_reason", "stop_reason", "num_input_tokens", "seed", "cum_log_probs")
    counted = {"text_output": ["".join(parts["text_output"])], "num_output_tokens": [sum(parts["num_output_tokens"])]}
    return {**parts, **counted, **{name: chunks[-1][name] for name in ends}}


@pytest.mark.parametrize("every", [1, 3])
def test_a_client_resumes_a_stream_with_the_ids_and_the_seed_of_its_chunks(reader: RequestReader, every: int) -> None:
    needs_compiled_kernels()
    parameters = {**ALL, "max_tokens": 20, "temperature": 1.2, "stop_words": ["le stream", "the"], "min_tokens": 9}
    sampling = json.dumps({"sampling_parameters": json.dumps(parameters)})

    def stream(**inputs: NDArray[Any]) -> list[dict[str, list[Any]]]:
        request = Request(sampling, text_input=text(PROMPT), stream=_flag(True), **inputs)
        _run(reader.engine, _read(reader, request), every)
        return [response.values() for response, _ in request.sent]

    whole = stream()
    (seed,) = whole[0]["seed"]
    assert len(whole) > 20 / every / 3
    assert [("prompt_logprobs" in chunk, "arrival_time_ns" in chunk) for chunk in whole] == [
        (place == 0, place == len(whole) - 1) for place in range(len(whole))
    ]
    for count in range(1, len(whole), 3):
        ids = [token for chunk in whole[:count] for token in chunk["output_ids"][0]]
        inputs: dict[str, NDArray[Any]] = {
            "resume_ids": np.array([ids], dtype=np.int32),
            "seed": np.array([[seed]], dtype=np.uint64),
        }
        resumed = stream(**inputs)
        assert _joined(resumed) == _joined(whole[count:])
        assert every > 1 or [chunk["text_output"] for chunk in resumed] == [
            chunk["text_output"] for chunk in whole[count:]
        ]
        assert not any("prompt_logprobs" in chunk for chunk in resumed)
        # One response has everything.
        answer = _answer(reader, Request(sampling, text_input=text(PROMPT), **inputs))
        parts = _joined(whole)
        assert json.loads(answer.pop("logprobs")[0]) == parts.pop("logprobs")
        assert answer["prompt_logprobs"] == whole[0]["prompt_logprobs"]
        for name, value in parts.items():
            assert answer[name] == ([value] if name in ("output_ids", "output_log_probs") else value), name


@pytest.mark.parametrize(("name", "output"), [("prompt_logprobs", "prompt_logprobs"), ("num_logprobs", "logprobs")])
def test_many_log_probabilities_are_written_between_other_responses(
    reader: RequestReader, monkeypatch: pytest.MonkeyPatch, name: str, output: str
) -> None:
    limit = _int32(30)
    inputs = {"text_input": text(PROMPT * 20), name: _int32(2), "n": _int32(2), "max_tokens": limit}
    inputs |= {"min_tokens": limit, "seed": np.array([[5]], dtype=np.uint64)}
    expected = _answer(reader, Request("", **inputs))[output]
    monkeypatch.setattr("llama_engine.triton.responder.MAX_TOKENS_AT_ONCE", 4)
    request = Request("", **inputs)
    responder, results, before = _read(reader, request), list[Event](), list[int]()
    other = Mock(ResponseSink, send=lambda _: before.append(len(request.sent)))
    with monkeypatch.context() as patched:
        patched.setattr(responder, "send", results.extend)
        _run(reader.engine, responder)
    reader.dispatcher.post([*((responder, result) for result in results), (other, Chunk("", 1))])
    assert reader.dispatcher.close(60)
    ((answered, final),) = request.sent
    assert final
    assert answered.values()[output] == expected
    assert before == [0]


def test_a_choice_that_fails_ends_the_stream_with_its_error(reader: RequestReader) -> None:
    request = Request('{"max_tokens": 9}', text_input=text(PROMPT), n=_int32(2), stream=_flag(True))
    responder = _read(reader, request)
    for sequence in responder.sequences:
        reader.engine.add(sequence)
    reader.engine.step()
    chunks = [chunk for sequence in responder.sequences if (chunk := sequence.chunk_cutter.next()) is not None]
    responder.send([*chunks, Cancelled("gone")])
    responder.send([Cancelled("gone, too")])
    assert [final for _, final in request.sent] == [False] * len(chunks) + [True]
    error = request.sent[-1][0].error
    assert isinstance(error, TritonError)
    assert (str(error), error.code) == ("CANCELLED: gone", TritonError.CANCELLED)
    # So that the choices that still run leave their slots.
    assert responder.is_cancelled()
