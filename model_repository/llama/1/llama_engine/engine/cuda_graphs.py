"""The decode step as CUDA graphs: one launch replays a captured sequence of kernels.

A decode step of a Llama is some twenty kernels per layer; launched one by one, they leave a GPU mostly waiting for the
host. A graph runs the same kernels on the same memory with the same sizes. So a step is padded to the next bucket of
batch size and of span (the positions that attention reads), and all values that change between steps are in tensors
with fixed addresses. Source: torch.cuda.CUDAGraph; vLLM and TensorRT-LLM do the same.

A step is two graphs: the forward pass up to the logits, captured per batch size and span, then sampling, captured per
batch size and sampling features. In between, the host adds the logits of sequences that have just been prefilled.
Sampling runs without a graph if any sequence has per-sequence biases or masks (such as bad words), min_p or log
probabilities, and for features whose sampling can't be captured.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from llama_engine.engine.decode import DecodeBatch
from llama_engine.errors import one_line
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.model.loader import LoadedModel
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sampling.sampler import Sampler
from llama_engine.sampling.state import SamplingFeatures

MIN_SPAN = 256
"""Smallest span bucket, in positions that attention reads; each further bucket is twice as large."""

FEATURE_SETS = (
    SamplingFeatures(),
    SamplingFeatures(noise=True),
    SamplingFeatures(repetition=True, output_counts=True, noise=True, truncation=True),
)
"""Feature sets for which sampling is captured: greedy; random; random with penalties and truncation. A step uses the
first set that covers its features; if no set does, its sampling runs without a graph.
"""

TOLERANCE = 2e-2
"""Tolerated difference of replayed from launched logits, relative to the largest: a few bfloat16 roundings."""

_log = logging.getLogger(__name__)

Action = Callable[[], None]

Capture = Callable[[Action], Action]
"""Capture the action's kernels; return a function that replays them. May call the action to warm up."""


def batch_buckets(slots: int) -> tuple[int, ...]:
    """Return the batch sizes with a graph, ascending. Gaps grow with the size, as padding matters less."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, slots, 64)]
    return (*(size for size in sizes if size < slots), slots)


def span_buckets(max_model_len: int) -> tuple[int, ...]:
    """Return the spans (positions that attention reads) with a graph, ascending."""
    doubled = [MIN_SPAN << power for power in range(max_model_len.bit_length())]
    return (*(span for span in doubled if span < max_model_len), max_model_len)


def graph_count(shape: KVCacheShape) -> int:
    """Return the number of graphs captured for a KV cache of this shape."""
    return len(batch_buckets(shape.slots)) * (len(span_buckets(shape.max_model_len)) + len(FEATURE_SETS))


def unsupported_reason(loaded: LoadedModel) -> str | None:
    """Return why a checkpoint's decode step can't be captured; None if nothing is known to prevent it."""
    info = loaded.info
    if info.device.type != "cuda":
        return f"the model is on the {info.device.type.upper()}"
    if info.threshold:
        return f"at int8_threshold {info.threshold:g} bitsandbytes synchronizes with the device in every layer"
    return None


def cuda_capture(device: torch.device) -> Capture:
    """Return a Capture for CUDA. Its graphs share one memory pool, so only one may be replayed at a time.

    The returned function passes on exceptions of the action and of CUDA. It leaves the capture's stream and memory pool
    first, but an error of CUDA itself can leave the device unusable.
    """
    pool = torch.cuda.graph_pool_handle()
    # One stream for all captures: cuBLAS keeps a workspace for every stream that it was ever called on.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(action: Action) -> Action:
        current = torch.cuda.current_stream(device)
        # Run once before capturing: first-call initialization and compilation can't be part of a graph.
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
            # If ending the capture fails, PyTorch leaves the thread on the side stream and the allocator on the pool.
            torch.cuda.set_stream(current)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch.cuda.synchronize(device)
            raise
        return graph.replay

    return capture


class DecodeGraphs:
    """The captured decode steps of one batch. Not thread-safe: one step at a time."""

    def __init__(
        self, loaded: LoadedModel, shape: KVCacheShape, model: ModelRunner, sampler: Sampler, batch: DecodeBatch
    ) -> None:
        """Allocate the graphs' inputs and outputs; `capture` creates the graphs."""
        device = loaded.info.device
        self._model, self._sampler, self._batch = model, sampler, batch
        self._padding = shape.max_model_len
        self._batch_buckets, self._span_buckets = batch_buckets(shape.slots), span_buckets(shape.max_model_len)
        # Sampling takes float32.
        self._logits = torch.zeros(shape.slots, loaded.architecture.vocabulary, device=device)
        self._indices = torch.arange(shape.slots, device=device)
        # Number of sequences of the padded step that decode, on the device.
        self._decoding = torch.zeros((), dtype=torch.long, device=device)
        # Sampling inputs computed on the host, per slot: two random words, and 1 before min_tokens. The host writes the
        # pinned tensor, which is copied to the tensor that the graphs read.
        self._host_inputs = torch.zeros(shape.slots, 3, dtype=torch.long, pin_memory=device.type == "cuda")
        self._sampling_inputs = torch.zeros(shape.slots, 3, dtype=torch.long, device=device)
        self._forwards: dict[tuple[int, int], Action] = {}
        self._samplings: dict[tuple[int, SamplingFeatures], Action] = {}

    @property
    def count(self) -> int:
        """Number of captured graphs."""
        return len(self._forwards) + len(self._samplings)

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture every graph and verify two of them against launched kernels.

        No slot may be in use, because capturing runs steps of padding alone. Raises RuntimeError for wrong logits, and
        passes on errors of the capture of a forward pass. Sampling that can't be captured is launched.
        """
        self._decoding.fill_(0)
        # Capture the largest first, so that the smaller graphs reuse its memory.
        for batch_size in reversed(self._batch_buckets):
            for span in reversed(self._span_buckets):
                self._forwards[batch_size, span] = capture(partial(self._forward, batch_size, span))
            for features in reversed(FEATURE_SETS):
                try:
                    self._samplings[batch_size, features] = capture(partial(self._sample, batch_size, features))
                except Exception as error:  # noqa: BLE001 - sampling works without a graph
                    _log.warning(
                        "sampling of a batch of %d with %s can't be captured and is launched: %s",
                        batch_size, features, one_line(error),
                    )  # fmt: skip
        self._verify(self._batch_buckets[-1], self._span_buckets[0])
        self._verify(self._batch_buckets[0], self._span_buckets[-1])

    def step(self, decoding: int, prefilled: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sample the next token of every sequence, [batch], and store it as the input of its next step.

        decoding: number of leading sequences that run a forward pass. prefilled: hidden states of the others, which
        have just been prefilled, [batch, hidden] in all. If it raises, nothing has been stored.
        """
        batch = self._batch
        sequences = batch.sequences
        batch_size = len(sequences)
        self._decoding.fill_(decoding)
        if decoding:
            num_computed = max(sequence.num_computed for sequence in sequences[:decoding])
            self._forwards[_bucket(self._batch_buckets, decoding), _bucket(self._span_buckets, num_computed + 1)]()
        if prefilled:
            # This follows the replay, whose padding overwrites these logits.
            self._logits[decoding:batch_size] = self._model.logits(torch.cat([*prefilled]))
        features = next((features for features in FEATURE_SETS if features.cover(batch.features)), None)
        bucket = _bucket(self._batch_buckets, batch_size)
        sampling = None if features is None else self._samplings.get((bucket, features))
        if sampling is None:
            tokens = self._sampler.sample(self._logits[:batch_size], slice(0, batch_size), sequences, batch.features)
            batch.advance(decoding, tokens)
            return tokens
        self._stage_sampling_inputs()
        sampling()
        return batch.tokens[:batch_size]

    def _stage_sampling_inputs(self) -> None:
        """Copy the sampling inputs of all sequences to the device, in one asynchronous copy.

        Overwriting the pinned tensor is safe: the previous copy is done, as the host has read the tokens of that step.
        """
        sequences = self._batch.sequences
        indices = slice(0, len(sequences))
        inputs = self._host_inputs.numpy()
        if self._batch.features.noise:
            inputs[indices, :2] = self._sampler.keys(indices, sequences)
        inputs[indices, 2] = [sequence.num_output_tokens < sequence.request.min_tokens for sequence in sequences]
        self._sampling_inputs[indices].copy_(self._host_inputs[indices], non_blocking=True)

    def _active(self, batch_size: int) -> torch.Tensor:
        """Return which of the first `batch_size` elements decode in this step: [batch], bool."""
        return self._indices[:batch_size] < self._decoding

    def _forward(self, batch_size: int, span: int) -> None:
        """Compute the logits of the first `batch_size` elements; those from `_decoding` on are padding."""
        active = self._active(batch_size)
        # A padding element's KV slot may belong to another sequence, so its position is the one in the null page. Its
        # token may be FAILED, which is no index into the embedding.
        positions = torch.where(active, self._batch.positions[:batch_size], self._padding)
        tokens = torch.where(active, self._batch.tokens[:batch_size], 0)
        kv_slots = self._batch.kv_slots[:batch_size]
        self._logits[:batch_size] = self._model.logits(self._model.decode(kv_slots, tokens, positions, span))

    def _sample(self, batch_size: int, features: SamplingFeatures) -> None:
        """Sample for the first `batch_size` elements and store the tokens. Tokens of padding are discarded."""
        logits = self._sampler.penalize(self._logits[:batch_size].float(), slice(0, batch_size), features)
        too_early = self._sampling_inputs[:batch_size, 2:] > 0
        logits = logits.masked_fill(too_early & self._sampler.is_end, -torch.inf)
        tokens = self._sampler.select(logits, slice(0, batch_size), features, self._sampling_inputs[:batch_size, :2])
        self._batch.positions[:batch_size] += self._active(batch_size)
        self._batch.tokens[:batch_size] = tokens

    def _verify(self, batch_size: int, span: int) -> None:
        """Raise RuntimeError if replayed logits differ from launched ones. No slot may have had pages yet."""
        # The last sampling may have stored FAILED, which is no valid input.
        self._batch.tokens.zero_()
        self._decoding.fill_(batch_size)
        self._forward(batch_size, span)
        launched = self._logits[:batch_size].clone()
        self._logits.zero_()
        self._forwards[batch_size, span]()
        error = ((self._logits[:batch_size] - launched).abs().max() / launched.abs().max()).item()
        if not error <= TOLERANCE:
            raise RuntimeError(f"replayed logits are wrong by {error:.1%} of the largest")


def capture_graphs(
    loaded: LoadedModel,
    shape: KVCacheShape,
    model: ModelRunner,
    sampler: Sampler,
    batch: DecodeBatch,
    capture: Capture | None = None,
) -> DecodeGraphs | None:
    """Capture the decode steps of a batch and return them; if that fails, log the reason and return None.

    capture: None captures CUDA graphs if the checkpoint's decode step allows it.
    """
    reason = None if capture else unsupported_reason(loaded)
    if reason is None:
        try:
            graphs = DecodeGraphs(loaded, shape, model, sampler, batch)
            graphs.capture(capture or cuda_capture(loaded.info.device))
            return graphs
        except Exception as error:  # noqa: BLE001 - decoding works without graphs
            reason = one_line(error)
    _log.warning("decode steps can't be captured as CUDA graphs and launch every kernel: %s", reason)
    return None


def _bucket(buckets: Sequence[int], count: int) -> int:
    """Return the smallest bucket that holds `count`."""
    return buckets[bisect_left(buckets, count)]
