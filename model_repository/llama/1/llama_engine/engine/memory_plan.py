"""The memory plan: weights, KV cache, sampling state and reserve, checked before the cache is allocated.

The plan covers all memory that decoding uses. A plan that does not fit is refused when the model loads, so that a
server does not run out of memory under load.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.rope import depends_on_length
from llama_engine.engine.adapters import lora_limits
from llama_engine.engine.cuda_graphs import graph_count, unsupported_reason
from llama_engine.errors import InvalidSettings, OutOfMemoryPlan
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.kernels.cpu.forward import PackedLlama
from llama_engine.model.loader import LoadedModel
from llama_engine.sampling.state import SamplingState
from llama_engine.settings import Settings

SLOT_TOKENS = 4096
"""Tokens per slot of the default KV cache, if max_model_len isn't less."""

_CACHE_SHARE, _CACHE_BYTES = 4, 1 << 30
"""On a CPU the default KV cache has at most that many times the weights' bytes, or these bytes if they are more."""

_MIN_MODEL_LEN = 2

_MIB = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, the device's budget for them, and the shape of the KV cache.

    weights: size of the loaded weights. sampling: sampling parameters and token histories. reserve: activations,
    attention and CUDA graphs. adapters: LoRA adapters as large as the settings allow. free: free memory of the device
    besides the weights. fraction: usable share of weights + free, the setting `memory_fraction`. graphs: whether decode
    steps may be captured as CUDA graphs.
    """

    weights: int
    cache: int
    sampling: int
    reserve: int
    free: int
    fraction: float
    device: str
    shape: KVCacheShape
    graphs: bool = False
    adapters: int = 0

    @property
    def total(self) -> int:
        """Bytes that the plan requires."""
        return self.weights + self.cache + self.sampling + self.reserve + self.adapters

    @property
    def budget(self) -> int:
        """Bytes that the plan may use."""
        return int(self.fraction * (self.weights + self.free))

    def describe(self) -> str:
        """Return the plan as one line, for the log."""
        shape = self.shape
        tokens_per_slot = min(shape.tokens // shape.slots, shape.max_model_len)
        holds = f"{shape.slots} sequences of {tokens_per_slot:,} tokens"
        if tokens_per_slot < shape.max_model_len:
            holds += f" or {shape.tokens // shape.max_model_len} of {shape.max_model_len:,}"
        adapters = f" + adapters {_mib(self.adapters)}" if self.adapters else ""
        return (
            f"memory plan on {self.device}: weights {_mib(self.weights)} + cache {_mib(self.cache)} "
            f"({shape.tokens:,} tokens x {shape.bytes_per_token:,} B: {holds}) "
            f"+ sampling {_mib(self.sampling)} + reserve {_mib(self.reserve)}{adapters} = {_mib(self.total)} "
            f"of {_mib(self.budget)} ({self.fraction:.0%} of {_mib(self.weights + self.free)})"
        )

    @property
    def fitting_tokens(self) -> int:
        """Number of tokens in the largest cache that fits, whole pages; it can be less than max_model_len."""
        page = self.shape.page_size * self.shape.bytes_per_token
        spare = self.budget - (self.total - self.cache)
        # The null page doesn't count.
        return max(spare // page - 1, 0) * self.shape.page_size

    def check(self) -> None:
        """Raise OutOfMemoryPlan with the figures and the settings to change if the plan does not fit."""
        if self.total <= self.budget:
            return
        fits, needed = self.fitting_tokens, self.shape.max_model_len
        if fits >= needed:
            advice = f"lower kv_cache_tokens to {fits}"
        elif fits >= _MIN_MODEL_LEN:
            advice = f"lower max_model_len, and kv_cache_tokens if it is set, to {fits}"
        else:
            loras = "max_loras, max_lora_rank, " if self.adapters else ""
            advice = f"lower {loras}prefill_tokens or slots, or take a smaller or more strongly quantized checkpoint"
        raise OutOfMemoryPlan(f"{self.describe()}: does not fit; {advice}")


def plan_memory(loaded: LoadedModel, settings: Settings, slots: int) -> MemoryPlan:
    """Return the plan for a loaded checkpoint with `slots` slots. `MemoryPlan.check` raises if it doesn't fit.

    Without the setting `kv_cache_tokens` the cache is reduced to what fits, but holds at least one sequence of
    max_model_len; on a CPU, whose memory has other uses, it is at most 4 times the weights, or 1 GiB if that is more.
    Without the setting `max_model_len` that is reduced, too, by halves, but not below SLOT_TOKENS, and not if RoPE
    depends on it.
    Raises InvalidSettings if `slots` is 0, if `kv_cache_tokens` is less than max_model_len, or if `max_loras` is too
    few.
    """
    if slots < 1:
        raise InvalidSettings(f"slots is {slots}; it must be at least 1 (max_batch_size, if it isn't set)")
    positions, tokens = loaded.max_model_len, settings.kv_cache_tokens
    if tokens is not None and tokens < positions:
        raise InvalidSettings(
            f"kv_cache_tokens is {tokens}; it must be at least max_model_len, {positions} (or lower that)"
        )
    plan = _fitting_plan(loaded, settings, slots)
    # Tables of RoPE that depend on max_model_len have been computed for it.
    reducible = settings.max_model_len is None and not depends_on_length(loaded.config)
    while plan.total > plan.budget and reducible and plan.shape.max_model_len > SLOT_TOKENS:
        shorter = max(plan.shape.max_model_len // 2, SLOT_TOKENS)
        plan = _fitting_plan(replace(loaded, max_model_len=shorter), settings, slots)
    if plan.total <= plan.budget and plan.shape.max_model_len < positions:
        _log.warning("max_model_len is %d, not %d: no more fit into the memory", plan.shape.max_model_len, positions)
    return plan


def _fitting_plan(loaded: LoadedModel, settings: Settings, slots: int) -> MemoryPlan:
    """Return the plan with the cache of the settings, else with the default one, reduced to what fits."""
    if settings.kv_cache_tokens is not None:
        return _plan(loaded, settings, slots, settings.kv_cache_tokens)
    shape, positions = loaded.cache_shape(slots, settings.kv_cache_dtype), loaded.max_model_len
    pages = slots * shape.pages_of(min(positions, SLOT_TOKENS))
    if loaded.info.device.type == "cpu":
        limit = max(_CACHE_SHARE * loaded.info.weight_bytes, _CACHE_BYTES)
        pages = min(pages, limit // (shape.page_size * shape.bytes_per_token))
    pages = max(pages, shape.pages_of(positions))
    plan = _plan(loaded, settings, slots, pages * shape.page_size)
    if plan.total <= plan.budget:
        return plan
    reduced = _plan(loaded, settings, slots, max(plan.fitting_tokens, positions))
    if reduced.total <= reduced.budget:
        _log.warning(
            "the KV cache has %d tokens, not %d: no more fit into the memory", reduced.shape.tokens, plan.shape.tokens
        )
    return reduced


def _plan(loaded: LoadedModel, settings: Settings, slots: int, tokens: int) -> MemoryPlan:
    architecture, info = loaded.architecture, loaded.info
    graphs = settings.cuda_graphs != "off" and unsupported_reason(loaded) is None
    shape = loaded.cache_shape(slots, settings.kv_cache_dtype, tokens)
    return MemoryPlan(
        weights=info.weight_bytes,
        cache=shape.bytes,
        sampling=SamplingState.bytes_for(slots, architecture.vocabulary),
        reserve=activation_reserve(
            min(settings.prefill_tokens, slots * loaded.max_model_len),
            slots,
            architecture,
            info.dtype.itemsize,
            exact_on_gpu=bool(info.product) and info.device.type == "cuda",
        )
        + _score_reserve(loaded, settings)
        + (graph_reserve(shape, architecture, info.dtype.itemsize) if graphs else 0)
        + loaded.attention_reserve(shape),
        free=free_bytes(info.device) - (0 if loaded.is_loaded else info.weight_bytes),
        fraction=settings.memory_fraction,
        device=str(info.device),
        shape=shape,
        graphs=graphs,
        adapters=loaded.lora_bytes(lora_limits(settings)),
    )


def _score_reserve(loaded: LoadedModel, settings: Settings) -> int:
    """Return the bytes of a prefill's attention scores in PyTorch: with a soft cap they are stored."""
    architecture, itemsize = loaded.architecture, loaded.info.dtype.itemsize
    if architecture.attention_softcap is None or isinstance(loaded.model, PackedLlama):
        return 0
    positions = loaded.max_model_len
    return architecture.heads * min(settings.prefill_tokens, positions) * positions * (2 * itemsize + 4)


def activation_reserve(
    prefill_tokens: int, slots: int, architecture: Architecture, itemsize: int, exact_on_gpu: bool = False
) -> int:
    """Estimate the peak bytes of a forward pass besides weights and cache.

    A prefill peaks in the MLP, with hidden states, residual, gate, up and their product. SDPA doesn't store attention
    scores; with a soft cap `_score_reserve` has them. An INT8 product is int32 before scaling, of at most two terms on
    a CPU. Logits of at most `slots` tokens exist at once, and sampling sorts and copies them in float32. exact_on_gpu:
    whether `exact_int8` computes the INT8 products: the int32 sums of two terms, their float64 sum and the float32
    result then exist together for gate and up.
    """
    hidden, intermediate = architecture.hidden, architecture.intermediate
    product = 2 * intermediate * (2 * 4 + 8 + 4) if exact_on_gpu else 8 * intermediate
    prefill = prefill_tokens * ((4 * hidden + 4 * intermediate) * itemsize + product)
    logits = slots * architecture.vocabulary * 4 * 10
    return prefill + logits + 64 * _MIB


def graph_reserve(shape: KVCacheShape, architecture: Architecture, itemsize: int) -> int:
    """Estimate the bytes of CUDA graphs of the decode step: a step of all slots, the graphs' nodes, the logits.

    `activation_reserve` estimates the step; cuBLAS uses 32 MiB for the capture stream. The 4 MiB for the nodes of a
    graph, about a thousand kernels, are a guess that has not been measured on a GPU yet.
    """
    step = activation_reserve(shape.slots, shape.slots, architecture, itemsize)
    return step + shape.slots * architecture.vocabulary * 4 + (32 + 4 * graph_count(shape)) * _MIB


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on the device; for a CPU, within the container's memory limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Reserved but unallocated memory of PyTorch's allocator is available, too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_available_to_machine(), _available_to_cgroup())


def _available_to_machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OutOfMemoryPlan("/proc/meminfo has no MemAvailable: the free memory is unknown")


def _available_to_cgroup() -> int:
    cgroup = Path("/sys/fs/cgroup")
    if not (cgroup / "memory.max").exists() or (limit := (cgroup / "memory.max").read_text().strip()) == "max":
        return 1 << 62
    used = int((cgroup / "memory.current").read_text())
    # The page cache, mostly of the checkpoint just read, counts as used but is reclaimable.
    statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    reclaimable = int(statistics["active_file"]) + int(statistics["inactive_file"])
    return max(int(limit) - used + reclaimable, 0)


def _mib(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"
