"""Shortcuts to a real checkpoint, an engine and its pages, and runs of it.

Settings come from the arguments alone, never from the machine's environment.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion, Result
from llama_engine.engine.sequence import Sequence
from llama_engine.engine.step_result import StepResult
from llama_engine.kernels.cpu.build import object_path
from llama_engine.kernels.cpu.instruction_sets import allowed_instruction_sets
from llama_engine.kernels.gpu import gpu_reference
from llama_engine.kernels.gpu.varlen_attention import Layout
from llama_engine.model.cpu_runner import CpuRunner
from llama_engine.model.loader import LoadedModel, load_checkpoint
from llama_engine.model.torch_runner import TorchRunner
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer, Vocabulary

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "pydoc-llama"


def load(quantization: str, **parameters: str) -> LoadedModel:
    """Load a checkpoint on the CPU, the embedded one if no `model` is given."""
    values = {"model": str(EMBEDDED), "quantization": quantization, **parameters}
    return load_checkpoint(Settings.parse(values, {}), torch.device("cpu"))


def needs_compiled_kernels(instruction_set: str | None = None) -> None:
    """Skip the test unless an instruction set's kernels are built and this CPU runs them; None is any of them."""
    wanted = [name for name in allowed_instruction_sets() if instruction_set in (None, name)]
    if not any(object_path(name).exists() for name in wanted):
        pytest.skip("no kernels are compiled: no C++ compiler, or no AVX2")


def engine_of(checkpoint: LoadedModel, slots: int = 8, **parameters: str) -> Engine:
    return Engine(checkpoint, Settings.parse(parameters, {}), slots)


def runner_of(engine: Engine) -> TorchRunner:
    """The model runner of an engine on PyTorch's forward."""
    assert isinstance(engine._model, TorchRunner)
    return engine._model


def cache_tensors(engine: Engine, page: int | None = None) -> list[torch.Tensor]:
    """The tensors of an engine's KV cache, keys, values and their scales; views of one page's part if it is given."""
    if isinstance(engine._model, CpuRunner):
        layers = engine._model.cache.layers
        return [tensor if page is None else tensor[:, page] for tensors in layers for tensor in tensors]
    cache = runner_of(engine).cache
    tensors = [cache.keys, cache.values, cache.key_scales, cache.value_scales]
    return [tensor if page is None else tensor[:, page] for tensor in tensors if tensor.numel()]


def spoil_cache(engine: Engine, page: int | None = None) -> None:
    """Fill a page, or all of them, with NaN; in INT8 that is the scales, and the rest are the largest numbers."""
    for tensor in cache_tensors(engine, page):
        tensor.fill_(torch.nan if tensor.is_floating_point() else 127)


def free_pages(engine: Engine) -> list[int]:
    """The pages that hold nothing."""
    return list(engine._pages._pool._free)


def assert_consistent(engine: Engine) -> None:
    """Pages that no sequence holds are available; the page that a sequence writes to is its alone."""
    sequences, shape = [*engine._batch.sequences, *engine._prefill.sequences], engine.plan.shape
    holders = Counter(page for sequence in sequences for page in sequence.pages)
    assert len(holders) + engine._pages.num_available == shape.pages
    for sequence in sequences:
        written = sequence.pages[sequence.num_computed // shape.page_size :]
        assert all(holders[page] == 1 for page in written)
        assert (sequence.kv_slot is None) == (not sequence.pages)


def attention_by_sequence(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scaling: float, window: int | None
) -> torch.Tensor:
    """A GPU's attention, in plain PyTorch, one sequence after the other; a decode step's without reading a value."""
    if layout.max_queries == 1:
        return _decode_attention(query, keys, values, layout, scaling, window)
    attended = torch.empty_like(query)
    first, lengths = layout.first.tolist(), layout.lengths.tolist()
    for pages, begin, end, length in zip(layout.pages, first[:-1], first[1:], lengths, strict=True):
        of_sequence = keys[pages].flatten(0, 1), values[pages].flatten(0, 1)
        attended[begin:end] = gpu_reference.attention(query[begin:end], *of_sequence, length, scaling, window)
    return attended


def _decode_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scaling: float, window: int | None
) -> torch.Tensor:
    """Attention of one query a sequence, which a stand-in for a CUDA graph can record."""
    positions, lengths = torch.arange(layout.max_length), layout.lengths[:, None]
    beyond = (positions >= lengths) | (positions < lengths - (window or layout.max_length))
    outside = beyond[:, None, :, None]
    # Zeroed as well as masked: zero times a stale NaN is NaN.
    keys, values = (
        states[layout.pages].flatten(1, 2)[:, : layout.max_length].transpose(1, 2).masked_fill(outside, 0.0)
        for states in (keys, values)
    )
    grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1])
    scores = (grouped @ keys.transpose(2, 3) * scaling).masked_fill(outside.transpose(2, 3), -torch.inf)
    return (scores.softmax(-1) @ values).flatten(1, 2)


def with_tokens_as_text(checkpoint: LoadedModel) -> LoadedModel:
    """The same model, but every token, a special one too, is "<its number> ": a completion's text shows its tokens."""
    pieces = [f"{token} ".encode() for token in range(checkpoint.config.vocab_size)]
    return replace(checkpoint, tokenizer=Tokenizer(checkpoint.tokenizer.pretrained, Vocabulary(pieces)))


def tokens_in(text: str) -> list[int]:
    """The tokens of a completion by a checkpoint of `with_tokens_as_text`."""
    return [int(token) for token in text.split()]


def completions(engine: Engine, requests: Iterable[GenerationRequest]) -> list[Completion]:
    """Run the requests, each of which must succeed."""
    results = engine.generate(requests)
    assert all(isinstance(result, Completion) for result in results), results
    return [result for result in results if isinstance(result, Completion)]


_ALONE: dict[tuple[int, GenerationRequest], tuple[LoadedModel, Completion]] = {}


def alone(checkpoint: LoadedModel, requests: Iterable[GenerationRequest]) -> list[Completion]:
    """Run the requests one after the other on an engine of one slot, each once for all tests of the process."""
    requests = list(requests)
    new = [request for request in dict.fromkeys(requests) if (id(checkpoint), request) not in _ALONE]
    if new:
        for request, completion in zip(
            new, completions(engine_of(checkpoint, 1, prefix_cache="off"), new), strict=True
        ):
            # With the checkpoint, so that no other one gets its id.
            _ALONE[id(checkpoint), request] = checkpoint, completion
    return [_ALONE[id(checkpoint), request][1] for request in requests]


def add_all(engine: Engine, requests: Iterable[GenerationRequest]) -> list[Sequence]:
    """Give each request a slot."""
    sequences = [engine.builder.build(request) for request in requests]
    for sequence in sequences:
        engine.add(sequence)
    return sequences


@dataclass
class Run:
    """The results of sequences that went through an engine, in the order of their arrival, and every step."""

    results: list[Result | None] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)

    @property
    def errors(self) -> int:
        return sum(step.errors for step in self.steps)


def run(engine: Engine, sequences: list[Sequence]) -> Run:
    """Add the sequences as soon as there are slots, and step until all have finished, each exactly once."""
    waiting, steps = deque(sequences), []
    while waiting or engine.num_sequences:
        while waiting and engine.num_sequences < engine.slots:
            engine.add(waiting.popleft())
        steps.append(engine.step())
    finished = [sequence for step in steps for sequence in step.finished]
    assert len(finished) == len(set(finished)) == len(sequences)
    assert all(sequence.result is not None for sequence in sequences), "a sequence ended without a result"
    return Run([sequence.result for sequence in sequences], steps)
