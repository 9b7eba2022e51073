"""Decode steps as graphs, with a stand-in for CUDA's: the tokens of launched steps, whatever fails.

The stand-in shows without a GPU whether a computation can be captured: what Python decides during the capture is fixed,
tensors are read anew, results keep their memory, and the host may look at no value. It records PyTorch's operations
(below autograd, where kernels are chosen) and runs them again. Unlike on a GPU, a capture also computes, and a CPU
tensor's `tolist()` reads memory without an operation that could be refused.
"""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from adapter_files import write_adapter
from engine.engines import add_all, alone, attention_by_sequence, completions, engine_of, run, spoil_cache
from engine.prompts import random_request, request_of, requests_of
from llama_engine.engine import cuda_graphs, memory_plan
from llama_engine.engine.cuda_graphs import FEATURE_SETS, Action, Capture, DecodeGraphs, batch_buckets
from llama_engine.engine.engine import Engine
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling import sampler
from llama_engine.sampling.state import SamplingFeatures
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {f"aten.{name}.default" for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal")}
"""Operations whose result the host needs; a stream in capture refuses them."""

FROM_THE_HOST = "aten.lift_fresh.default"
"""A tensor made of Python values: on a GPU a copy from the host, except for a single value, which is a fill."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # TorchDispatchMode isn't annotated
    """Records the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Callable[[], object], list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run one operation and record it."""
        operation = partial(func, *args, **(kwargs or {}))
        result = operation()
        copied = str(func) == FROM_THE_HOST and any(tensor.dim() for tensor in _tensors(result))
        if str(func) in WAITING or copied:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        self._operations.append((operation, _tensors(result)))
        return result

    def replay(self) -> None:
        """Compute every operation from the present values of its arguments, into the same memory."""
        for operation, results in self._operations:
            for old, new in zip(results, _tensors(operation()), strict=True):
                # Views and results of in-place operations are there already.
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class Recorder:
    """A `Capture` that counts captures and replays. failing: numbers of the replays, from 0, that raise instead."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self.failing = range(0)

    def __call__(self, action: Action) -> Action:
        """Record what an action does; as on a GPU it runs once before."""
        action()
        with Recording() as recording:
            action()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            if self.replayed - 1 in self.failing:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            recording.replay()

        return replay


def _tensors(result: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


SLOTS = 6
"""With five sequences there is padding in the last slot, where a long prompt is prefilled in chunks."""
SPANS = 3


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    """Sampling that looks at no value, graphs of several spans for short sequences, and the plan of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "on_cpu", lambda _: False)
        patch.setattr(cuda_graphs, "MIN_SPAN", 32)
        patch.setattr(memory_plan, "unsupported_reason", lambda checkpoint: None)
        yield


@pytest.fixture(scope="module")
def small(fp32: LoadedModel) -> LoadedModel:
    """FP32 with a short context."""
    return replace(fp32, max_model_len=128)


@pytest.fixture(scope="module", params=["mask", "by row"])
def attending(request: pytest.FixtureRequest, small: LoadedModel) -> LoadedModel:
    """The same with each of the two forms of attention."""
    return replace(small, attention=attention_by_sequence if request.param == "by row" else None)


def _graphed(checkpoint: LoadedModel, slots: int = SLOTS, **parameters: str) -> tuple[Engine, Recorder]:
    """An engine whose steps are graphs, and what recorded them."""
    engine, recorder = engine_of(checkpoint, slots, cuda_graphs="on", **parameters), Recorder()
    engine.capture_graphs(recorder)
    assert recorder.captured == len(batch_buckets(slots)) * (SPANS + len(FEATURE_SETS))
    recorder.replayed = 0
    return engine, recorder


@pytest.fixture(scope="module")
def graphed(attending: LoadedModel) -> Engine:
    """One of six slots that several tests use."""
    return _graphed(attending)[0]


def _greedy(count: int, tokens: int = 6) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt="", prompt_tokens=(50, 60, 70 + row), max_tokens=tokens, min_tokens=tokens)
        for row in range(count)
    ]


def test_replayed_steps_give_the_tokens_of_launched_ones(attending: LoadedModel) -> None:
    randomness = random.Random(3)
    engine, recorder = _graphed(attending, prefill_tokens="24")
    requests = [random_request(attending, randomness) for _ in range(12)]
    replayed = run(engine, [engine.builder.build(request) for request in requests])
    assert replayed.results == alone(attending, requests)
    # Every decode step was a replay; every sampling was one too, except beside what a row alone asks for.
    decoded = sum(bool(step.decoded) for step in replayed.steps)
    sampled = sum(bool(step.sampled) for step in replayed.steps)
    assert decoded < recorder.replayed < decoded + sampled


@pytest.mark.parametrize("size", [31, 32])
def test_a_sequence_that_outgrows_a_span_has_all_its_positions(small: LoadedModel, size: int) -> None:
    request = GenerationRequest("", tuple(range(40, 40 + size)), max_tokens=6, min_tokens=6, temperature=1.0, seed=size)
    assert completions(_graphed(small, 1)[0], [request]) == alone(small, [request])


@pytest.mark.parametrize("place", [0, 2])
def test_a_sequence_that_is_not_finite_spoils_neither_others_nor_its_slot(
    attending: LoadedModel, graphed: Engine, place: int
) -> None:
    requests = _greedy(4)
    expected = alone(attending, requests)
    sequences = add_all(graphed, requests)
    graphed.step()
    spoil_cache(graphed, sequences[place].pages[0])
    assert [graphed.step().errors for _ in range(6)] == [0] * 6
    assert str(sequences[place].result) == "the model's logits for this request were not finite"
    others = [sequence.result for sequence in sequences if sequence is not sequences[place]]
    assert others == [*expected[:place], *expected[place + 1 :]]
    assert completions(graphed, requests) == expected


@pytest.mark.parametrize("failing", [range(1), range(3, 4), range(1000)])
def test_graphs_are_not_used_after_three_failures_in_a_row(small: LoadedModel, failing: range) -> None:
    requests = requests_of(small, 3, max_tokens=7)
    engine, recorder = _graphed(small)
    recorder.failing = failing
    replayed = run(engine, [engine.builder.build(request) for request in requests])
    assert replayed.results == alone(small, requests)
    assert replayed.errors == min(len(failing), 3)
    assert ("CUDA graphs" in engine.describe_decode()) is (len(failing) == 1)


def test_padding_does_not_overwrite_a_prompt_that_is_partly_cached(attending: LoadedModel) -> None:
    long = GenerationRequest(prompt="", prompt_tokens=tuple(range(20, 120)), max_tokens=4, min_tokens=4)
    engine, _ = _graphed(attending, prefill_tokens="24")
    # The last slot has been used, and still has the position of that sequence's next token.
    add_all(engine, [*_greedy(SLOTS - 1, tokens=20), *_greedy(1, tokens=3)])
    while engine.num_sequences == SLOTS:
        engine.step()
    (sequence,) = add_all(engine, [long])
    while sequence.result is None:
        engine.step()
    assert [sequence.result] == alone(attending, [long])


def test_captured_steps_give_each_adapters_tokens(small: LoadedModel, tmp_path: Path) -> None:
    adapters = ", ".join(f"{seed}={write_adapter(tmp_path / f'{seed}', seed)}" for seed in range(2))
    launched = engine_of(small, SLOTS, lora_adapters=adapters)
    graphed, recorder = _graphed(small, lora_adapters=adapters)
    of_each = [replace(request_of(small, 1, 40), adapter=adapter) for adapter in (None, *launched.adapters.loaded())]
    results = completions(launched, of_each)
    assert completions(graphed, of_each) == results
    assert len({result.text for result in results}) == 3
    assert recorder.replayed > 0


def _out_of_memory(action: Action) -> Action:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("setting", "capture", "reason"),
    [
        ("on", _out_of_memory, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("on", lambda action: lambda: None, "RuntimeError: replayed logits are wrong by 100.0% of the largest"),
        ("on", None, "the model is on the CPU"),
        # Without the setting nothing is captured, and nothing logged.
        ("off", _out_of_memory, ""),
    ],
)
def test_steps_that_cannot_be_captured_are_launched(
    small: LoadedModel, setting: str, capture: Capture | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, cuda_graphs.__name__)
    engine = engine_of(small, SLOTS, cuda_graphs=setting)
    if capture is None:
        engine.warm_up()
    else:
        engine.capture_graphs(capture)
    expected = f"decode steps can't be captured as CUDA graphs and launch every kernel: {reason}"
    lines = [record.getMessage() for record in caplog.records if record.name == cuda_graphs.__name__]
    assert lines == ([expected] if reason else [])
    assert engine.describe_decode().endswith(", launched")
    assert completions(engine, _greedy(3)) == alone(small, _greedy(3))


def test_steps_with_an_outlier_threshold_are_not_captured(small: LoadedModel) -> None:
    on_a_gpu = replace(small, info=replace(small.info, device=torch.device("cuda"), threshold=6.0))
    reason = "at int8_threshold 6 bitsandbytes synchronizes with the device in every layer"
    assert cuda_graphs.unsupported_reason(on_a_gpu) == reason


def test_sampling_that_cannot_be_captured_is_launched_alone(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sample = DecodeGraphs._sample

    def failing(graphs: DecodeGraphs, rows: int, features: SamplingFeatures) -> None:
        if features.truncation:
            raise RuntimeError("operation not permitted when stream is capturing")
        sample(graphs, rows, features)

    monkeypatch.setattr(DecodeGraphs, "_sample", failing)
    engine, recorder = engine_of(small, SLOTS, cuda_graphs="on"), Recorder()
    engine.capture_graphs(recorder)
    assert recorder.captured == len(batch_buckets(SLOTS)) * (SPANS + len(FEATURE_SETS) - 1)
    assert engine.describe_decode().endswith(f", replayed as {recorder.captured} CUDA graphs")
    assert "sampling of a batch of 6 with SamplingFeatures(repetition=True" in caplog.text
    requests = [replace(request, repetition_penalty=1.2) for request in _greedy(3)]
    assert completions(engine, requests) == alone(small, requests)
    assert recorder.replayed
