"""Loading and whole steps of the engine on a GPU without a device: one device, planned dtypes, one wait a step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from engine.engines import add_all
from engine.fake_gpu import DEVICE, TOKEN, Recorder, fake_gpu
from engine.transcripts import build
from llama_engine.engine.cuda_graphs import Action, DecodeGraphs, graph_count
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.engine.step_result import StepResult
from llama_engine.model.loader import load_checkpoint
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.settings import Settings

SLOTS = 4
FLOATS = {"quantization": "none"}
"""Settings of float16 and FlashAttention, as in `batched_fp16`; the default ones have INT8 weights."""
MASKED = {"quantization": "none", "dtype": "bfloat16", "kv_cache_dtype": "int8"}
"""Settings of attention with masks."""

SAMPLED: dict[str, object] = {
    "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "seed": 3, "repetition_penalty": 1.2,
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "bad_words": (b"the",), "allowed_token_ids": (TOKEN, 6, 7),
    "logit_bias": ((TOKEN, 2.0),),
}  # fmt: skip


class Gpu(NamedTuple):
    """An engine, and what it does on the GPU."""

    engine: Engine
    recorder: Recorder


def _requests(**values: object) -> list[GenerationRequest]:
    """Return requests of one token, of several, and of more than a prefill pass."""
    return [
        GenerationRequest(prompt="", prompt_tokens=(TOKEN,) * size, max_tokens=3, min_tokens=3, **values)  # type: ignore[arg-type]  # values are fields
        for size in (1, 9, 40)
    ]


@contextmanager
def _gpu(checkpoint: Path, parameters: Mapping[str, str]) -> Iterator[Gpu]:
    # Each sequence has a page of 256 positions, and leaves one for each of the others.
    values = {"model": str(checkpoint), "device": "cuda", "prefill_tokens": "32", "kv_cache_tokens": "2048"}
    settings = Settings.parse({**values, **parameters}, {})
    with pytest.MonkeyPatch.context() as monkeypatch, fake_gpu(monkeypatch) as recorder:
        engine = Engine(load_checkpoint(settings, DEVICE), settings, SLOTS)
        yield Gpu(engine, recorder)
        engine.guides.close()


@pytest.fixture(scope="module")
def gpu(small_checkpoint: Path) -> Iterator[Gpu]:
    with _gpu(small_checkpoint, {}) as gpu:
        yield gpu


def _finish(gpu: Gpu, waits: Callable[[StepResult], int] = lambda step: 1) -> None:
    """Run all sequences. waits: how often the host waits for the GPU in a step."""
    while gpu.engine.num_sequences:
        gpu.recorder.clear()
        step = gpu.engine.step()
        assert step.errors == 0
        assert (gpu.recorder.waits, gpu.recorder.blocking_copies) == (waits(step), 0)


@pytest.mark.parametrize("values", [{}, SAMPLED], ids=["greedy", "sampled, with penalties and masks"])
def test_a_step_waits_for_the_gpu_once(gpu: Gpu, values: dict[str, object]) -> None:
    sequences = add_all(gpu.engine, _requests(**values))
    _finish(gpu)
    assert all(isinstance(sequence.result, Completion) for sequence in sequences)


def test_a_step_with_guides_waits_once(gpu: Gpu) -> None:
    plain = GenerationRequest("", (TOKEN,) * 9, max_tokens=3)
    requests = [replace(plain, guided_decoding_guide_type="regex", guided_decoding_guide="1{5}|2"), plain]
    sequences = [build(gpu.engine, request) for request in requests]
    for sequence in sequences:
        gpu.engine.add(sequence)
    # As without guides: their masks are filled on the host, and copied without waiting.
    _finish(gpu)
    assert [sequence.result.text for sequence in sequences if isinstance(sequence.result, Completion)] == ["111"] * 2


def test_log_probabilities_are_read_at_once(gpu: Gpu) -> None:
    sequences = add_all(gpu.engine, _requests(num_logprobs=2, prompt_logprobs=1, return_log_probs=True))
    # Of the tokens, of their log probabilities, and of those of all prompts in the pass.
    _finish(gpu, lambda step: 2 + bool(step.prefill_tokens))
    assert [len(sequence.prompt_log_probs) for sequence in sequences] == [0, 8, 39]
    assert [len(sequence.log_probs) for sequence in sequences] == [3, 3, 3]


def test_choices_are_generated(gpu: Gpu) -> None:
    results = gpu.engine.generate(_requests(n=2))
    assert [result.num_output_tokens for result in results if isinstance(result, Completion)] == [3] * 3, results


@pytest.fixture(params=[{}, FLOATS, MASKED], ids=["INT8", "FP16", "masked"])
def any_gpu(request: pytest.FixtureRequest, small_checkpoint: Path) -> Iterator[Gpu]:
    with _gpu(small_checkpoint, request.param) as gpu:
        yield gpu


def test_a_captured_step_never_waits_and_a_replayed_one_waits_once(
    any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its verification needs values.
    monkeypatch.setattr(DecodeGraphs, "_verify", lambda *_: None)
    actions: list[Action] = []

    def capture(action: Action) -> Action:
        any_gpu.recorder.clear()
        action()
        assert any_gpu.recorder.waits == 0
        actions.append(action)
        return action

    any_gpu.engine.capture_graphs(capture)
    assert len(actions) == graph_count(any_gpu.engine.plan.shape)
    sequences = add_all(any_gpu.engine, _requests())
    _finish(any_gpu)
    assert "CUDA graphs" in any_gpu.engine.describe_decode()
    assert all(isinstance(sequence.result, Completion) for sequence in sequences)
