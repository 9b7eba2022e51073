"""The decode step as CUDA graphs: what the host would launch kernel by kernel, the device repeats at one word.

A step of a Llama is some thirty kernels a layer, and with PyTorch's own launches a GPU waits for the host most of the
time. A graph is the same kernels on the same memory with the same sizes, so a step is padded up to the next bucket of
rows and of positions that attention reads, and all that changes from step to step lies in tensors that stay where they
are. Source: torch.cuda.CUDAGraph; vLLM, TensorRT-LLM and TGI do likewise.

A step is two graphs, with what can't be captured between and beside them: the forward pass for rows and span, up to
the logits; then the choice of tokens for rows and what they ask for. In between come the logits of rows whose prompts
have just been read; and where a row has bad words, which tokens those are is found on the host, and the choice is made
without a graph. Knows neither requests nor rows' lengths; when a step is made, and what is done if it fails, is the
engine's.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from llama_engine.errors import one_line
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sampling.sampler import Needs, Sampler
from llama_engine.text.bad_words import BadWords

LEAST_SPAN = 256
"""Positions that attention reads in the graphs for the shortest rows; the next ones read twice as many each."""

KINDS = (Needs(), Needs(noise=True), Needs(repetition=True, output_counts=True, noise=True, truncation=True))
"""What the rows of a step may ask for: the best token, a draw, everything. The first that covers it is taken."""

TOLERANCE = 2e-2
"""How far replayed logits may lie from launched ones, in parts of the largest: some roundings of bfloat16."""

_MOVING_ROPE = ("dynamic", "longrope")

_log = logging.getLogger(__name__)

Action = Callable[[], None]

Capture = Callable[[Action], Action]
"""Keeps what an action has the device do, and returns what has it done again. The action may be called for that."""


def row_buckets(slots: int) -> tuple[int, ...]:
    """Return for how many rows there are graphs, ascending. Of many rows a few more matter less, and graphs cost."""
    some = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, slots, 64)]
    return (*(rows for rows in some if rows < slots), slots)


def span_buckets(max_model_len: int) -> tuple[int, ...]:
    """Return for how many positions there are graphs, ascending."""
    doubled = [LEAST_SPAN << power for power in range(max_model_len.bit_length())]
    return (*(span for span in doubled if span < max_model_len), max_model_len)


def graph_count(shape: KVCacheShape) -> int:
    """Return the number of graphs that are captured for a cache."""
    return len(row_buckets(shape.slots)) * (len(span_buckets(shape.max_model_len)) + len(KINDS))


def why_not(checkpoint: Checkpoint) -> str | None:
    """Return why a checkpoint's step can't be a graph, as far as that is known without trying; None if it isn't."""
    info = checkpoint.info
    if info.device.type != "cuda":
        return f"graphs are CUDA's, and the model is on the {info.device.type.upper()}"
    if info.rounds_activations and info.threshold:
        return f"at int8_threshold {info.threshold:g} bitsandbytes waits for the device in every layer"
    rope = (checkpoint.config.rope_parameters or {}).get("rope_type")
    if rope in _MOVING_ROPE:
        return f"the rotation of this checkpoint ({rope}) depends on the longest row"
    return None


def cuda_capture(device: torch.device) -> Capture:
    """Return a Capture whose graphs share their memory: they are replayed one after the other.

    What it raises is what the action raises, or CUDA; the device is as usable afterwards as that leaves it.
    """
    pool = torch.cuda.graph_pool_handle()
    # One for all: matrix libraries keep a workspace for every stream that they have ever been called on.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(action: Action) -> Action:
        current = torch.cuda.current_stream(device)
        # What libraries set up at their first call on a stream, and what is compiled, must not be a part of the graph.
        side.wait_stream(current)
        with torch.cuda.stream(side):
            action()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # The process has other threads, which may look at the device's memory meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                action()
        except Exception:
            # Where ending the capture fails, PyTorch leaves the thread on its stream, and the allocator at the pool.
            torch.cuda.set_stream(current)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch.cuda.synchronize(device)
            raise
        return graph.replay

    return capture


class DecodeGraphs:
    """The graphs of one engine's steps. Not thread-safe: one step at a time."""

    def __init__(self, checkpoint: Checkpoint, model: ModelRunner, sampler: Sampler, shape: KVCacheShape) -> None:
        """Allocate what graphs hand on to each other; `record` makes them. The cache has a spare position."""
        assert shape.spare, "padding has no position to write to"
        device = checkpoint.info.device
        self._model, self._sampler = model, sampler
        self._row_buckets, self._span_buckets = row_buckets(shape.slots), span_buckets(shape.max_model_len)
        # In float32, as sampling wants them.
        self._logits = torch.zeros(shape.slots, checkpoint.config.vocab_size, device=device)
        self._chosen = torch.zeros(shape.slots, dtype=torch.long, device=device)
        self._forwards: dict[tuple[int, int], Action] = {}
        self._choices: dict[tuple[int, Needs], Action] = {}

    @torch.inference_mode()
    def record(self, capture: Capture) -> None:
        """Capture every graph, and hold two against what they were captured from; raises what goes wrong there.

        Only while no row is seated: actions are run for it, though with no rows but padding.
        """
        self._model.pad(0)
        # The largest first: the others' memory then fits into what those have taken.
        for rows in reversed(self._row_buckets):
            for span in reversed(self._span_buckets):
                self._forwards[rows, span] = capture(partial(self._forward, rows, span))
            for needs in reversed(KINDS):
                self._choices[rows, needs] = capture(partial(self._choose, rows, needs))
        self._check(self._row_buckets[-1], self._span_buckets[0])
        self._check(self._row_buckets[0], self._span_buckets[-1])

    def step(
        self,
        decoding: int,
        longest: int,
        prompted: Sequence[torch.Tensor],
        steps: Sequence[int],
        banned: Sequence[BadWords | None],
    ) -> torch.Tensor:
        """Choose the next tokens of the first len(`steps`) slots and note them as their next step's input; [rows].

        decoding: the first so many slots make a decode step for it. longest: positions that one of these holds
        already. prompted: hidden states of the slots behind those, [rows, hidden] in all. steps, banned: as
        `Sampler.sample` takes them. If it raises, nothing has been noted.
        """
        rows = len(steps)
        self._model.pad(decoding)
        if decoding:
            self._forwards[_up(self._row_buckets, decoding), _up(self._span_buckets, longest + 1)]()
        if prompted:
            # After the replay, whose padding has written there.
            self._logits[decoding:rows] = self._model.logits(torch.cat([*prompted]))
        if any(words is not None for words in banned):
            tokens = self._sampler.sample(self._logits[:rows], 0, steps, banned)
            self._model.advance(decoding, tokens)
            return tokens
        needs = next(kind for kind in KINDS if kind.cover(self._sampler.needs))
        self._sampler.stage(steps)
        self._choices[_up(self._row_buckets, rows), needs]()
        return self._chosen[:rows]

    def _forward(self, rows: int, span: int) -> None:
        self._logits[:rows] = self._model.logits(self._model.padded_step(rows, span))

    def _choose(self, rows: int, needs: Needs) -> None:
        tokens = self._sampler.choose(self._logits[:rows], needs)
        self._chosen[:rows] = tokens
        self._model.padded_advance(rows, tokens)

    def _check(self, rows: int, span: int) -> None:
        """Raise RuntimeError if a replay isn't what launching comes to. Writes to the first position of each slot."""
        # Any token that there is: the last choice may have been FAILED.
        self._model.advance(0, torch.zeros_like(self._chosen))
        self._model.pad(rows)
        self._forward(rows, span)
        launched = self._logits[:rows].clone()
        self._logits.zero_()
        self._forwards[rows, span]()
        error = ((self._logits[:rows] - launched).abs().max() / launched.abs().max()).item()
        if not error <= TOLERANCE:
            raise RuntimeError(f"replayed logits are wrong by {error:.1%} of the largest")


def record_graphs(
    checkpoint: Checkpoint, model: ModelRunner, sampler: Sampler, shape: KVCacheShape, capture: Capture | None = None
) -> DecodeGraphs | None:
    """Return the graphs of a checkpoint's steps; None, and one line in the log, where they can't be made.

    capture: how; None is CUDA's, where that is possible.
    """
    reason = None if capture else why_not(checkpoint)
    if reason is None:
        try:
            graphs = DecodeGraphs(checkpoint, model, sampler, shape)
            graphs.record(capture or cuda_capture(checkpoint.info.device))
        except Exception as error:  # noqa: BLE001 - whatever can't be captured can still be launched
            reason = one_line(error)
        else:
            return graphs
    _log.warning("decode steps can't be CUDA graphs, they are launched kernel by kernel: %s", reason)
    return None


def _up(buckets: Sequence[int], count: int) -> int:
    """Return the smallest bucket that holds so many."""
    return buckets[bisect_left(buckets, count)]
