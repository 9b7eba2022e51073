"""Decode steps as graphs, with a stand-in for CUDA's: the tokens of launched steps, whatever fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from engine.engines import alone, completions, engine_of
from engine.forward_passes import before_each
from engine.prompts import random_prompt
from engine.recorded_graphs import Recorder
from engine.requests import requests_of
from engine.stepping import run_requests
from llama_engine import cuda_graphs
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.cuda_graphs import FEATURE_SETS, Action, Capture, row_buckets, span_buckets, unsupported_reason
from llama_engine.engine import Engine
from llama_engine.kernels import reference
from llama_engine.kernels.selection import Kernels
from llama_engine.model import memory_plan
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import activation_reserve, plan_memory
from llama_engine.sampling import logits_processors
from llama_engine.sequence import Sequence
from llama_engine.settings import Settings
from transformers import GenerationConfig

SLOTS = 6
"""With five sequences there is padding in the last slot, where a long prompt is prefilled in chunks."""
SPANS = 3


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Sampling that looks at no value, graphs of several spans for short sequences, and the plan of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_processors, "CANDIDATES", 1 << 30)
        patch.setattr(cuda_graphs, "LEAST_SPAN", 32)
        patch.setattr(memory_plan, "unsupported_reason", lambda checkpoint: None)
        yield


@pytest.fixture(scope="module")
def small(fp32: Checkpoint) -> Checkpoint:
    """FP32 with a short context."""
    return replace(fp32, max_model_len=128)


@pytest.fixture(scope="module", params=["mask", "by row"])
def attending(request: pytest.FixtureRequest, small: Checkpoint) -> Checkpoint:
    """The same with each of the two forms of attention."""
    attention = reference.decode_attention if request.param == "by row" else None
    return replace(small, kernels=Kernels(attention=attention))


def _graphed(checkpoint: Checkpoint, slots: int = SLOTS, **parameters: str) -> tuple[Engine, Recorder]:
    """An engine whose steps are graphs, and what recorded them."""
    engine, recorder = engine_of(checkpoint, slots, cuda_graphs="on", **parameters), Recorder()
    engine.capture_graphs(recorder)
    assert recorder.captured == len(row_buckets(slots)) * (SPANS + len(FEATURE_SETS))
    recorder.replayed = 0
    return engine, recorder


def _random_request(checkpoint: Checkpoint, randomness: random.Random) -> GenerationRequest:
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.25, "frequency_penalty": 0.5},
        {"presence_penalty": 1.0},
        {"bad_words": (b"e",)},
    ]
    max_tokens, size = randomness.randint(1, 12), randomness.choice((1, 3, 8, 20, 50, 100))
    return GenerationRequest(
        prompt="",
        prompt_tokens=random_prompt(checkpoint.tokenizer, range(size, size + 1), randomness)[1],
        max_tokens=max_tokens,
        min_tokens=randomness.choice((0, max_tokens)),
        seed=randomness.getrandbits(64),
        **randomness.choices(kinds, (4, 4, 4, 4, 1))[0],  # type: ignore[arg-type]  # values are fields
    )


def _greedy(count: int, tokens: int = 6) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt="", prompt_tokens=(50, 60, 70 + row), max_tokens=tokens, min_tokens=tokens)
        for row in range(count)
    ]


def _add(engine: Engine, requests: list[GenerationRequest]) -> list[Sequence]:
    sequences = [engine.sequence(request) for request in requests]
    for sequence in sequences:
        engine.add(sequence)
    return sequences


def _keys(engine: Engine, slot: int, length: int) -> torch.Tensor:
    return torch.stack([layer.keys[slot, :, :length] for layer in engine._batch.kv_cache.slot_layers])


def test_replayed_steps_give_the_tokens_of_launched_ones(attending: Checkpoint) -> None:
    """Sequences are added one by one, and some are removed."""
    randomness = random.Random(3)
    engine, recorder = _graphed(attending, prefill_tokens="24")
    requests = [_random_request(attending, randomness) for _ in range(40)]
    expected = alone(attending, requests)
    sequences = [engine.sequence(request) for request in requests]
    waiting, decoded, sampled = list(sequences), 0, 0
    while waiting or engine.used_slots:
        while waiting and engine.used_slots < engine.slots and randomness.random() < 0.5:
            engine.add(waiting.pop(0))
        if randomness.random() < 0.05:
            engine.remove(randomness.choice(sequences))
        step = engine.step()
        assert step.errors == 0
        decoded += bool(step.decoded)
        sampled += bool(step.sampled)
    found = [(one.result, other) for one, other in zip(sequences, expected, strict=True) if one.result is not None]
    assert len(found) > len(requests) / 2
    assert [result for result, _ in found] == [other for _, other in found]
    # Every decode step was a replay; every sampling was one too, except beside bad words.
    assert decoded < recorder.replayed < decoded + sampled


def test_replayed_steps_end_no_text_before_min_tokens(attending: Checkpoint) -> None:
    # Half of the vocabulary ends a text: without the mask, the first tokens would.
    ends = GenerationConfig(eos_token_id=list(range(attending.config.vocab_size // 2)))
    checkpoint = replace(attending, generation_config=ends)
    requests = [replace(request, min_tokens=4, max_tokens=12) for request in _greedy(SLOTS)]
    replayed = completions(_graphed(checkpoint)[0], requests)
    assert replayed == completions(engine_of(checkpoint, SLOTS), requests)
    assert "stop" in {completion.finish_reason for completion in replayed}
    assert all(completion.num_output_tokens >= 4 for completion in replayed)


@pytest.mark.parametrize("size", [30, 31, 32, 33, 62, 63, 64])
def test_a_sequence_that_outgrows_a_span_keeps_all_its_positions(attending: Checkpoint, size: int) -> None:
    request = GenerationRequest(
        prompt="", prompt_tokens=tuple(range(40, 40 + size)), max_tokens=6, min_tokens=6, temperature=1.0, seed=size
    )
    launched, (replayed, _) = engine_of(attending, 1), _graphed(attending, 1)
    _add(launched, [request])
    (sequence,) = _add(replayed, [request])
    for _ in range(5):
        for engine in (launched, replayed):
            assert engine.step().sampled == 1
        length = sequence.num_cached
        assert torch.allclose(_keys(replayed, 0, length), _keys(launched, 0, length), atol=1e-4)


def test_each_decode_step_is_replayed_once_and_never_launched(small: Checkpoint) -> None:
    engine, recorder = _graphed(small)
    _add(engine, _greedy(3))
    launched: list[int] = []
    with before_each(small, lambda number, _: launched.append(number)):
        # The prefill, and the sampling of the first tokens.
        assert engine.step().sampled == 3
        assert (len(launched), recorder.replayed) == (1, 1)
        for done in range(1, 6):
            assert engine.step().decoded == 3
            assert (len(launched), recorder.replayed) == (1, 1 + 2 * done)
    assert engine.used_slots == 0


@pytest.mark.parametrize("place", range(4))
def test_a_sequence_that_is_not_finite_spoils_neither_others_nor_its_slot(attending: Checkpoint, place: int) -> None:
    requests = _greedy(4)
    expected = alone(attending, requests)
    engine, _ = _graphed(attending)
    sequences = _add(engine, requests)
    engine.step()
    for layer in engine._batch.kv_cache.slot_layers:
        layer.values[place, :, 1] = torch.nan
    assert [engine.step().errors for _ in range(6)] == [0] * 6
    for index, sequence in enumerate(sequences):
        if index == place:
            assert str(sequence.result) == "the model's logits for this request were not finite"
        else:
            assert sequence.result == expected[index]
    assert completions(engine, requests) == expected


@pytest.mark.parametrize("number", [0, 1, 2, 3, 6])
def test_a_replay_that_fails_once_changes_no_result(small: Checkpoint, number: int) -> None:
    requests = requests_of(small, 3, max_tokens=7)
    engine, recorder = _graphed(small)
    recorder.failing = range(number, number + 1)
    run = run_requests(engine, requests)
    assert run.errors == 1
    assert run.results == alone(small, requests)


def test_graphs_are_not_used_after_three_consecutive_failed_replays(small: Checkpoint) -> None:
    requests = _greedy(3, tokens=12)
    engine, recorder = _graphed(small)
    recorder.failing = range(1000)
    run = run_requests(engine, requests)
    assert [step.errors for step in run.steps] == [1, 1, 1, *[0] * 9]
    assert run.results == alone(small, requests)
    assert engine.describe_decode().endswith(", launched")


def test_padding_does_not_overwrite_a_prompt_that_is_partly_cached(attending: Checkpoint) -> None:
    size = 100
    long = GenerationRequest(prompt="", prompt_tokens=tuple(range(20, 20 + size)), max_tokens=2, min_tokens=2)
    undisturbed = engine_of(attending, 1)
    _add(undisturbed, [long])
    undisturbed.step()
    engine, _ = _graphed(attending, prefill_tokens="24")
    # The last slot has been used, and still has the position of that sequence's next token.
    _add(engine, [*_greedy(SLOTS - 1, tokens=20), *_greedy(1, tokens=3)])
    while engine.used_slots == SLOTS:
        engine.step()
    assert 0 < int(engine._batch.positions[SLOTS - 1, 0]) < size
    (sequence,) = _add(engine, [long])
    while not sequence.num_output_tokens:
        assert engine.used_slots == SLOTS
        engine.step()
    assert torch.allclose(_keys(engine, SLOTS - 1, size), _keys(undisturbed, 0, size), atol=1e-4)


def _log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == cuda_graphs.__name__]


def _out_of_memory(action: Action) -> Action:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")


def _nothing(action: Action) -> Action:
    return lambda: None


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (_out_of_memory, "OutOfMemoryError: CUDA out of memory."),
        (_nothing, "RuntimeError: replayed logits are wrong by 100.0% of the largest"),
        (None, "the model is on the CPU"),
    ],
)
def test_steps_that_cannot_be_captured_are_launched_and_the_log_says_why(
    small: Checkpoint, capture: Capture | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(small, SLOTS, cuda_graphs="on")
    engine.capture_graphs(capture)
    assert _log_lines(caplog) == [f"decode steps can't be captured as CUDA graphs and launch every kernel: {reason}"]
    assert completions(engine, _greedy(3)) == alone(small, _greedy(3))


def test_only_the_setting_has_steps_captured_during_warm_up(
    small: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, cuda_graphs.__name__)
    recorder, engine = Recorder(), engine_of(small, 2)
    engine.capture_graphs(recorder)
    assert recorder.captured == 0
    engine.warm_up()
    assert _log_lines(caplog) == []
    assert engine.describe_decode().endswith(", launched")
    engine_of(small, 2, cuda_graphs="on").warm_up()
    assert len(_log_lines(caplog)) == 1
    assert _graphed(small)[0].describe_decode().endswith(", replayed as 24 CUDA graphs")


def test_checkpoints_whose_steps_wait_for_the_device_are_not_captured(fp32: Checkpoint) -> None:
    on_a_gpu = replace(fp32, info=replace(fp32.info, device=torch.device("cuda")))
    assert unsupported_reason(on_a_gpu) is None
    outliers = replace(on_a_gpu.info, threshold=6.0, rounds_activations=True)
    assert unsupported_reason(replace(on_a_gpu, info=outliers)) == (
        "at int8_threshold 6 bitsandbytes synchronizes with the device in every layer"
    )
    assert unsupported_reason(replace(on_a_gpu, info=replace(outliers, threshold=0.0))) is None
    with pytest.MonkeyPatch.context() as patch:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        patch.setattr(fp32.config, "rope_parameters", rope)
        assert unsupported_reason(on_a_gpu) == (
            "the rotary embedding of this checkpoint (dynamic) depends on the longest sequence"
        )


def test_the_memory_plan_includes_what_graphs_need(small: Checkpoint) -> None:
    without = plan_memory(small, Settings(), SLOTS)
    planned = plan_memory(small, Settings(cuda_graphs="on"), SLOTS)
    config = small.config
    hidden, inner, words = config.hidden_size, config.intermediate_size, config.vocab_size
    step = activation_reserve(SLOTS, SLOTS, hidden, inner, words, 4)
    assert planned.reserve - without.reserve == step + SLOTS * words * 4 + (32 + 4 * 24) * 2**20
    cache = engine_of(small, SLOTS, cuda_graphs="on")._batch.kv_cache
    assert planned.cache == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.slot_layers)
    assert planned.cache == without.cache * 129 // 128
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "unsupported_reason", lambda checkpoint: "it is no GPU")
        assert plan_memory(small, Settings(cuda_graphs="on"), SLOTS).total == without.total


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 31, 32, 33, 128, 1000])
def test_every_number_of_rows_has_a_bucket_that_is_not_far_larger(slots: int) -> None:
    buckets = row_buckets(slots)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == slots
    for rows in range(1, slots + 1):
        bucket = next(bucket for bucket in buckets if bucket >= rows)
        assert bucket <= max(2 * rows, 1) or bucket - rows < 16


@pytest.mark.parametrize("length", [2, 31, 32, 33, 4096, 5000])
def test_every_length_has_a_span_at_most_twice_as_long(length: int) -> None:
    buckets = span_buckets(length)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == length
    assert all(longer <= 2 * shorter for shorter, longer in pairwise(buckets))
