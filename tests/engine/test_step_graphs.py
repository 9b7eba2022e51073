"""Decode steps as graphs, with a stand-in for CUDA's: the same tokens as launched steps, whatever fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from engine.engines import completions, engine_of
from engine.forward_passes import before_each
from engine.prompts import random_prompt
from engine.recorded_graphs import Recorder
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.cuda_graphs import FEATURE_SETS, Action, Capture, row_buckets, span_buckets, unsupported_reason
from llama_engine.engine import Engine
from llama_engine.kernels import reference
from llama_engine.kernels.selection import Kernels
from llama_engine.model import cuda_graphs as step_graphs
from llama_engine.model import memory_plan as memory
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import activation_reserve, plan_memory
from llama_engine.sampling import logits_processors as sampling
from llama_engine.sequence import Result, Sequence
from llama_engine.settings import Settings

SLOTS = 6
"""With five rows there is padding in the last slot, where a long prompt may be read."""
SPANS = 3


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Sampling that doesn't look at values, and graphs of several spans for short rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "CANDIDATES", 1 << 30)
        patch.setattr(step_graphs, "LEAST_SPAN", 32)
        # The plan of a GPU.
        patch.setattr(memory, "unsupported_reason", lambda checkpoint: None)
        yield


@pytest.fixture(scope="module", params=["mask", "by row"])
def small(request: pytest.FixtureRequest, fp32: Checkpoint) -> Checkpoint:
    """FP32 with a short context, and with each of the two ways that attention goes."""
    attention = reference.decode_attention if request.param == "by row" else None
    return replace(fp32, max_model_len=128, kernels=Kernels(attention=attention))


@dataclass(frozen=True)
class Graphed:
    """An engine whose steps are graphs."""

    engine: Engine
    recorder: Recorder


def graphed(checkpoint: Checkpoint, slots: int = SLOTS, **parameters: str) -> Graphed:
    found = Graphed(engine_of(checkpoint, slots, cuda_graphs="on", **parameters), Recorder())
    found.engine.capture_graphs(found.recorder)
    assert found.recorder.captured == len(row_buckets(slots)) * (SPANS + len(FEATURE_SETS))
    found.recorder.replayed = 0
    return found


def request_of(checkpoint: Checkpoint, randomness: random.Random, **given: object) -> GenerationRequest:
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.25, "frequency_penalty": 0.5},
        {"presence_penalty": 1.0},
        {"bad_words": (b"e",)},
    ]
    chosen: dict[str, object] = {
        "max_tokens": randomness.randint(1, 12),
        "seed": randomness.getrandbits(64),
        **randomness.choices(kinds, (4, 4, 4, 4, 1))[0],
        **given,
    }
    size = randomness.choice((1, 3, 8, 20, 50, 100))
    tokens = random_prompt(checkpoint.tokenizer, range(size, size + 1), randomness)[1]
    chosen.setdefault("min_tokens", randomness.choice((0, chosen["max_tokens"])))
    return GenerationRequest(prompt="", prompt_tokens=tokens, **chosen)  # type: ignore[arg-type]


def come_and_go(engine: Engine, rows: list[Sequence], randomness: random.Random) -> tuple[int, int]:
    """Let rows enter one by one and drop some; return decode steps and steps that chose any token."""
    waiting, decoded, chose = list(rows), 0, 0
    while waiting or engine.used_slots:
        while waiting and engine.used_slots < engine.slots and randomness.random() < 0.5:
            engine.add(waiting.pop(0))
        if randomness.random() < 0.05:
            engine.remove(randomness.choice(rows))
        step = engine.step()
        assert step.errors == 0
        decoded += bool(step.decoded)
        chose += bool(step.sampled)
    return decoded, chose


def test_a_replayed_step_chooses_otherwise_than_a_launched_one(small: Checkpoint) -> None:
    randomness = random.Random(3)
    graphs = graphed(small, prefill_tokens="24")
    requests = [request_of(small, randomness) for _ in range(40)]
    alone: list[Result] = [*completions(engine_of(small, 1), requests)]
    rows = [graphs.engine.sequence(request) for request in requests]
    decoded, chose = come_and_go(graphs.engine, rows, randomness)
    found = [(row.result, expected) for row, expected in zip(rows, alone, strict=True) if row.result is not None]
    assert len(found) > len(requests) / 2
    assert [outcome for outcome, _ in found] == [expected for _, expected in found]
    # Every decode step was a replay; every choice was one too, but for those beside bad words.
    assert decoded < graphs.recorder.replayed < decoded + chose


@pytest.mark.parametrize("size", [30, 31, 32, 33, 62, 63, 64])
def test_a_row_that_grows_out_of_a_span_misses_a_position(small: Checkpoint, size: int) -> None:
    request = GenerationRequest(
        prompt="", prompt_tokens=tuple(range(40, 40 + size)), max_tokens=6, min_tokens=6, temperature=1.0, seed=size
    )
    engine = engine_of(small, 1)
    replayed = graphed(small, 1).engine
    entered(engine, [request])
    entered(replayed, [request])
    for _ in range(5):
        for each in (engine, replayed):
            assert each.step().chosen == 1
        length = replayed._rows[0].length
        assert torch.allclose(keys_of(replayed, 0, length), keys_of(engine, 0, length), atol=1e-4)


def plain_requests(count: int, tokens: int = 6) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt="", prompt_tokens=(50, 60, 70 + row), max_tokens=tokens, min_tokens=tokens)
        for row in range(count)
    ]


def entered(engine: Engine, requests: list[GenerationRequest]) -> list[Sequence]:
    rows = [engine.sequence(request) for request in requests]
    for row in rows:
        engine.add(row)
    return rows


def test_a_step_is_launched_or_replayed_more_than_once(small: Checkpoint) -> None:
    graphs = graphed(small)
    entered(graphs.engine, plain_requests(3))
    launched: list[int] = []
    with before_each(small, lambda number, _: launched.append(number)):
        # The prompts are read, and their first tokens chosen.
        assert graphs.engine.step().chosen == 3
        assert (len(launched), graphs.recorder.replayed) == (1, 1)
        for done in range(1, 6):
            assert graphs.engine.step().decoded == 3
            assert (len(launched), graphs.recorder.replayed) == (1, 1 + 2 * done)
    assert graphs.engine.used_slots == 0


@pytest.mark.parametrize("place", range(4))
def test_a_row_that_is_not_finite_spoils_another_or_the_padding(small: Checkpoint, place: int) -> None:
    requests = plain_requests(4)
    expected = completions(engine_of(small, 1), requests)
    engine = graphed(small).engine
    rows = entered(engine, requests)
    engine.step()
    for layer in engine._model._cache.slot_layers:
        layer.values[place, :, 1] = torch.nan
    assert [engine.step().errors for _ in range(6)] == [0] * 6
    for index, row in enumerate(rows):
        if index == place:
            assert str(row.result) == "the model's logits for this request were not finite"
        else:
            assert row.result == expected[index]
    # Nothing of it is left to who comes next.
    assert completions(engine, requests) == expected


@pytest.mark.parametrize("number", [0, 1, 2, 3, 6])
def test_a_replay_that_fails_costs_a_row_or_counts_a_token_twice(small: Checkpoint, number: int) -> None:
    randomness = random.Random(number)
    kind: dict[str, object] = {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 1.0, "bad_words": ()}
    requests = [request_of(small, randomness, max_tokens=7, min_tokens=7, **kind) for _ in range(3)]
    expected = completions(engine_of(small, 1), requests)
    graphs = graphed(small)
    graphs.recorder.failing = range(number, number + 1)
    rows = entered(graphs.engine, requests)
    errors = 0
    while graphs.engine.used_slots:
        errors += graphs.engine.step().errors
    assert errors == 1
    assert [row.result for row in rows] == [*expected]


def keys_of(engine: Engine, slot: int, length: int) -> torch.Tensor:
    return torch.stack([layer.keys[slot, :, :length] for layer in engine._model._cache.slot_layers])


def test_padding_writes_over_a_prompt_that_is_being_read(small: Checkpoint) -> None:
    size = 100
    long = GenerationRequest(prompt="", prompt_tokens=tuple(range(20, 20 + size)), max_tokens=2, min_tokens=2)
    alone = engine_of(small, 1)
    entered(alone, [long])
    alone.step()
    engine = graphed(small, prefill_tokens="24").engine
    # The last slot has been somebody's, and still has the position of that row's next token.
    entered(engine, [*plain_requests(SLOTS - 1, tokens=20), *plain_requests(1, tokens=3)])
    while engine.used_slots == SLOTS:
        engine.step()
    assert 0 < int(engine._model._positions[SLOTS - 1, 0]) < size
    (row,) = entered(engine, [long])
    while row not in engine.step().started:
        assert engine.used_slots == SLOTS
    assert torch.allclose(keys_of(engine, SLOTS - 1, size), keys_of(alone, 0, size), atol=1e-4)


def test_replays_that_keep_failing_are_tried_for_ever(small: Checkpoint) -> None:
    requests = plain_requests(3, tokens=12)
    expected = completions(engine_of(small, 1), requests)
    graphs = graphed(small)
    graphs.recorder.failing = range(1000)
    rows = entered(graphs.engine, requests)
    errors = [graphs.engine.step().errors for _ in range(12)]
    assert errors == [1, 1, 1, *[0] * 9]
    assert [row.result for row in rows] == [*expected]
    assert graphs.engine.describe_decode().endswith(", launched")


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == step_graphs.__name__]


def _refused(action: Action) -> Action:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")


def _nothing(action: Action) -> Action:
    return lambda: None


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (_refused, "OutOfMemoryError: CUDA out of memory."),
        (_nothing, "RuntimeError: replayed logits are wrong by 100.0% of the largest"),
        (None, "graphs are CUDA's, and the model is on the CPU"),
    ],
)
def test_graphs_that_cannot_be_made_fail_the_load_or_go_unsaid(
    small: Checkpoint, capture: Capture | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    requests = plain_requests(3)
    engine = engine_of(small, SLOTS, cuda_graphs="on")
    engine.capture_graphs(capture)
    assert log_lines(caplog) == [f"decode steps can't be CUDA graphs, they are launched kernel by kernel: {reason}"]
    assert completions(engine, requests) == completions(engine_of(small, 1), requests)


def test_graphs_that_nobody_asked_for_are_made_or_a_proof_makes_none(
    small: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, step_graphs.__name__)
    recorder = Recorder()
    engine_of(small, 2).capture_graphs(recorder)
    assert recorder.captured == 0
    engine_of(small, 2).prove()
    assert log_lines(caplog) == []
    assert engine_of(small, 2).describe_decode().endswith(", launched")
    engine_of(small, 2, cuda_graphs="on").prove()
    assert len(log_lines(caplog)) == 1
    assert graphed(small).engine.describe_decode().endswith(", replayed as 24 CUDA graphs")


def test_a_checkpoint_that_waits_for_the_device_is_captured(fp32: Checkpoint) -> None:
    on_a_gpu = replace(fp32, info=replace(fp32.info, device=torch.device("cuda")))
    assert unsupported_reason(on_a_gpu) is None
    outliers = replace(on_a_gpu.info, threshold=6.0, rounds_activations=True)
    assert unsupported_reason(replace(on_a_gpu, info=outliers)) == (
        "at int8_threshold 6 bitsandbytes waits for the device in every layer"
    )
    assert unsupported_reason(replace(on_a_gpu, info=replace(outliers, threshold=0.0))) is None
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp32.config, "rope_parameters", rope)
        assert unsupported_reason(on_a_gpu) == "the rotation of this checkpoint (dynamic) depends on the longest row"


def test_the_plan_leaves_out_what_graphs_need(small: Checkpoint) -> None:
    without = plan_memory(small, Settings(), SLOTS)
    planned = plan_memory(small, Settings(cuda_graphs="on"), SLOTS)
    config = small.config
    hidden, inner, words = config.hidden_size, config.intermediate_size, config.vocab_size
    step = activation_reserve(SLOTS, SLOTS, hidden, inner, words, 4)
    assert planned.reserve - without.reserve == step + SLOTS * words * 4 + (32 + 4 * 24) * 2**20
    cache = engine_of(small, SLOTS, cuda_graphs="on")._model._cache
    assert planned.cache == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.slot_layers)
    assert planned.cache == without.cache * 129 // 128
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "unsupported_reason", lambda checkpoint: "it is no GPU")
        assert plan_memory(small, Settings(cuda_graphs="on"), SLOTS).total == without.total


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 31, 32, 33, 128, 1000])
def test_a_number_of_rows_has_no_bucket_or_one_far_too_large(slots: int) -> None:
    buckets = row_buckets(slots)
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == slots
    for rows in range(1, slots + 1):
        bucket = next(bucket for bucket in buckets if bucket >= rows)
        assert bucket <= max(2 * rows, 1) or bucket - rows < 16


@pytest.mark.parametrize("length", [2, 31, 32, 33, 4096, 5000])
def test_a_length_has_no_bucket_or_one_more_than_twice_as_long(length: int) -> None:
    buckets = span_buckets(length)
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == length
    assert all(longer <= 2 * shorter for shorter, longer in pairwise(buckets))
