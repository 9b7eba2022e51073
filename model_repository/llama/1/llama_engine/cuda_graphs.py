"""The decode step as CUDA graphs: the device repeats a captured sequence of kernels at one launch.

A decode step of a Llama is some thirty kernels a layer, and with PyTorch's launches a GPU mostly waits for the host. A
graph runs the same kernels on the same memory with the same sizes, so a step is padded to the next bucket of rows and
of positions that attention reads, and everything that changes from step to step lies in tensors that keep their
addresses. Source: torch.cuda.CUDAGraph; vLLM and TensorRT-LLM do likewise.

A step is two graphs: the forward pass for rows and span, up to the logits; then the sampling for rows and features. In
between, the host adds the logits of sequences that have just been prefilled. Where a sequence has a bias or masks of
its own, such as bad words, or asks for min_p or log probabilities, sampling is launched without a graph.
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
from llama_engine.sampling.sampler import Sampler
from llama_engine.sampling.sampling_state import SamplingFeatures
from llama_engine.slot_batch import SlotBatch

MIN_SPAN = 256
"""Positions that attention reads in the smallest graphs; each next bucket reads twice as many."""

FEATURE_SETS = (
    SamplingFeatures(),
    SamplingFeatures(noise=True),
    SamplingFeatures(repetition=True, output_counts=True, noise=True, truncation=True),
)
"""Sampling that is captured: greedy, random, with penalties and truncation. A step uses the first set that covers its
features; where none does, its sampling is launched.
"""

TOLERANCE = 2e-2
"""How far replayed logits may lie from launched ones, relative to the largest: some roundings of bfloat16."""

_log = logging.getLogger(__name__)

Action = Callable[[], None]

Capture = Callable[[Action], Action]
"""Capture the action's kernels; return a function that replays them. May call the action to warm up."""


def row_buckets(slots: int) -> tuple[int, ...]:
    """Return the row counts with a graph, ascending; the more rows, the less a few padding rows matter."""
    some = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, slots, 64)]
    return (*(rows for rows in some if rows < slots), slots)


def span_buckets(max_model_len: int) -> tuple[int, ...]:
    """Return the spans (positions that attention reads) with a graph, ascending."""
    doubled = [MIN_SPAN << power for power in range(max_model_len.bit_length())]
    return (*(span for span in doubled if span < max_model_len), max_model_len)


def graph_count(shape: KVCacheShape) -> int:
    """Return the number of graphs that are captured for a cache."""
    return len(row_buckets(shape.slots)) * (len(span_buckets(shape.max_model_len)) + len(FEATURE_SETS))


def unsupported_reason(checkpoint: Checkpoint) -> str | None:
    """Return why a checkpoint's step can't be captured, as far as that is known without trying; None if it can."""
    info = checkpoint.info
    if info.device.type != "cuda":
        return f"the model is on the {info.device.type.upper()}"
    if info.threshold:
        return f"at int8_threshold {info.threshold:g} bitsandbytes synchronizes with the device in every layer"
    return None


def cuda_capture(device: torch.device) -> Capture:
    """Return a Capture for CUDA, whose graphs share their memory: they are replayed one at a time.

    Raises what the action or CUDA raises; the device is then as usable as that leaves it.
    """
    pool = torch.cuda.graph_pool_handle()
    # One stream for all: matrix libraries keep a workspace for every stream that they were ever called on.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(action: Action) -> Action:
        current = torch.cuda.current_stream(device)
        # Set-up at the first call on a stream, and compilation, must not become part of the graph.
        side.wait_stream(current)
        with torch.cuda.stream(side):
            action()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads of the process may query the device's memory meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                action()
        except Exception:
            # When ending the capture fails, PyTorch leaves the thread on the side stream and the allocator at the pool.
            torch.cuda.set_stream(current)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch.cuda.synchronize(device)
            raise
        return graph.replay

    return capture


class DecodeGraphs:
    """The captured decode steps of one slot batch. Not thread-safe: one step at a time."""

    def __init__(
        self, checkpoint: Checkpoint, shape: KVCacheShape, model: ModelRunner, sampler: Sampler, batch: SlotBatch
    ) -> None:
        """Allocate what graphs read and write; `capture` makes them. The KV cache has a spare position per slot."""
        assert shape.spare, "padding rows have no position to write to"
        device = checkpoint.info.device
        self._model, self._sampler, self._batch = model, sampler, batch
        self._padding = shape.max_model_len
        self._row_buckets, self._span_buckets = row_buckets(shape.slots), span_buckets(shape.max_model_len)
        # float32, as sampling computes.
        self._logits = torch.zeros(shape.slots, checkpoint.config.vocab_size, device=device)
        self._rows = torch.arange(shape.slots, device=device)
        # How many rows of the padded step decode; read on the device.
        self._decoding = torch.zeros((), dtype=torch.long, device=device)
        # What sampling needs from the host, for each slot two random words and whether it must not end yet: where the
        # host writes it, and where the device reads it.
        self._host_inputs = torch.zeros(shape.slots, 3, dtype=torch.long, pin_memory=device.type == "cuda")
        self._sampling_inputs = torch.zeros(shape.slots, 3, dtype=torch.long, device=device)
        self._forwards: dict[tuple[int, int], Action] = {}
        self._samplings: dict[tuple[int, SamplingFeatures], Action] = {}

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture every graph and verify two of them against launched kernels; raises what goes wrong there.

        Only while no slot is in use: actions run for it, with padding rows only.
        """
        self._decoding.fill_(0)
        # The largest first: the others' memory then fits into theirs.
        for rows in reversed(self._row_buckets):
            for span in reversed(self._span_buckets):
                self._forwards[rows, span] = capture(partial(self._forward, rows, span))
            for features in reversed(FEATURE_SETS):
                self._samplings[rows, features] = capture(partial(self._sample, rows, features))
        self._verify(self._row_buckets[-1], self._span_buckets[0])
        self._verify(self._row_buckets[0], self._span_buckets[-1])

    def step(self, decoding: int, prefilled: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sample the next token of every row in use, [rows], and store it as the input of the row's next step.

        decoding: rows that run a forward pass, the first ones. prefilled: hidden states of the rows behind them,
        [rows, hidden] in all. If it raises, nothing has been stored.
        """
        batch = self._batch
        sequences = batch.sequences
        rows = len(sequences)
        self._decoding.fill_(decoding)
        if decoding:
            longest = max(sequence.num_cached for sequence in sequences[:decoding])
            self._forwards[_bucket(self._row_buckets, decoding), _bucket(self._span_buckets, longest + 1)]()
        if prefilled:
            # After the replay, whose padding rows write there.
            self._logits[decoding:rows] = self._model.logits(torch.cat([*prefilled]))
        features = next((features for features in FEATURE_SETS if features.cover(batch.features)), None)
        if features is None:
            tokens = self._sampler.sample(self._logits[:rows], 0, sequences, batch.features)
            batch.advance(decoding, tokens)
            return tokens
        self._stage_sampling_inputs()
        self._samplings[_bucket(self._row_buckets, rows), features]()
        return batch.tokens[:rows]

    def _stage_sampling_inputs(self) -> None:
        """Hand over what captured sampling needs from the host, in one copy that the host doesn't wait for.

        The device is done with the previous ones: the host has read the tokens that were sampled with them.
        """
        sequences = self._batch.sequences
        rows = slice(0, len(sequences))
        inputs = self._host_inputs.numpy()
        if self._batch.features.noise:
            inputs[rows, :2] = self._sampler.keys(0, sequences)
        inputs[rows, 2] = [sequence.num_output_tokens < sequence.request.min_tokens for sequence in sequences]
        self._sampling_inputs[rows].copy_(self._host_inputs[rows], non_blocking=True)

    def _active(self, rows: int) -> torch.Tensor:
        """Return which of the first rows decode in this step: [rows], bool."""
        return self._rows[:rows] < self._decoding

    def _forward(self, rows: int, span: int) -> None:
        """Compute the logits of the first rows, of which those beyond `_decoding` are padding."""
        active = self._active(rows)
        # The KV slot of a padding row may be another sequence's: only its spare position may be overwritten. Its token
        # may be FAILED, which no embedding has.
        positions = torch.where(active, self._batch.positions[:rows], self._padding)
        tokens = torch.where(active, self._batch.tokens[:rows], 0)
        kv_slots = self._batch.kv_slots[:rows]
        self._logits[:rows] = self._model.logits(self._model.decode(kv_slots, tokens, positions, span))

    def _sample(self, rows: int, features: SamplingFeatures) -> None:
        """Sample for the first rows and store the tokens; free rows sample something that nothing reads."""
        logits = self._sampler.penalize(self._logits[:rows].float(), slice(0, rows), features)
        too_early = self._sampling_inputs[:rows, 2:] > 0
        logits = logits.masked_fill(too_early & self._sampler.is_end, -torch.inf)
        tokens = self._sampler.select(logits, slice(0, rows), features, self._sampling_inputs[:rows, :2])
        self._batch.positions[:rows] += self._active(rows)
        self._batch.tokens[:rows] = tokens

    def _verify(self, rows: int, span: int) -> None:
        """Raise RuntimeError if replayed logits differ from launched ones. Writes to each slot's first position."""
        # A valid token: the last sampling may have stored FAILED.
        self._batch.tokens.zero_()
        self._decoding.fill_(rows)
        self._forward(rows, span)
        launched = self._logits[:rows].clone()
        self._logits.zero_()
        self._forwards[rows, span]()
        error = ((self._logits[:rows] - launched).abs().max() / launched.abs().max()).item()
        if not error <= TOLERANCE:
            raise RuntimeError(f"replayed logits are wrong by {error:.1%} of the largest")


def capture_graphs(
    checkpoint: Checkpoint,
    shape: KVCacheShape,
    model: ModelRunner,
    sampler: Sampler,
    batch: SlotBatch,
    capture: Capture | None = None,
) -> DecodeGraphs | None:
    """Return the captured decode steps of a batch; None, and one line in the log, where they can't be captured.

    capture: None captures CUDA graphs, where that is possible.
    """
    reason = None if capture else unsupported_reason(checkpoint)
    if reason is None:
        try:
            graphs = DecodeGraphs(checkpoint, shape, model, sampler, batch)
            graphs.capture(capture or cuda_capture(checkpoint.info.device))
            return graphs
        except Exception as error:  # noqa: BLE001 - whatever can't be captured can still be launched
            reason = one_line(error)
    _log.warning("decode steps can't be captured as CUDA graphs and launch every kernel: %s", reason)
    return None


def _bucket(buckets: Sequence[int], count: int) -> int:
    """Return the smallest bucket that holds `count`."""
    return buckets[bisect_left(buckets, count)]
