"""The memory plan: its figures are what is allocated; a plan that does not fit is refused with advice that helps."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from engine.engines import attention_by_sequence, engine_of, needs_compiled_kernels, runner_of
from llama_engine.engine import memory_plan
from llama_engine.engine.memory_plan import MemoryPlan, plan_memory
from llama_engine.errors import OutOfMemoryPlan
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.model.cpu_runner import CpuRunner
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import LoadedModel
from llama_engine.sampling.state import SamplingState
from llama_engine.settings import Settings

MIB = 1 << 20
SHAPE = KVCacheShape(
    layers=32, slots=32, key_value_heads=8, max_model_len=4096, head_dim=128, dtype=torch.float16, page_size=16,
    pages=8192,
)  # fmt: skip


def _plan(free: int, fraction: float = 0.9, pages: int = 8192, max_model_len: int = 4096) -> MemoryPlan:
    shape = replace(SHAPE, pages=pages, max_model_len=max_model_len)
    sampling = SamplingState.bytes_for(32, 128_256)
    return MemoryPlan(8000 * MIB, shape.bytes, sampling, 700 * MIB, free, fraction, "cuda:0", shape)


def test_a_plan_fits_to_the_byte() -> None:
    needed = _plan(0).total - _plan(0).weights
    _plan(needed, fraction=1.0).check()
    with pytest.raises(OutOfMemoryPlan):
        _plan(needed - 1, fraction=1.0).check()


def test_the_description_says_how_many_sequences_fit() -> None:
    line = r"cache 16,386 MiB \(131,072 tokens x 131,072 B: 32 sequences of 4,096 tokens\)"
    assert re.search(line, _plan(0).describe())
    line = r"\(131,072 tokens x 131,072 B: 32 sequences of 4,096 tokens or 4 of 32,768\)"
    assert re.search(line, _plan(0, max_model_len=32768).describe())


@pytest.mark.parametrize(
    ("free", "advice"),
    [
        (14_000, "lower kv_cache_tokens to "),
        (1700, "lower max_model_len, and kv_cache_tokens if it is set, to "),
        # Not even one token fits.
        (800, "lower prefill_tokens or slots, or take a smaller or more strongly quantized checkpoint"),
    ],
)
def test_a_refused_plan_advises_the_largest_cache_that_fits(free: int, advice: str) -> None:
    plan = _plan(free * MIB)
    with pytest.raises(OutOfMemoryPlan, match=rf"^{re.escape(plan.describe())}: does not fit; {advice}") as refused:
        plan.check()
    if free > 1000:
        tokens = int(str(refused.value).split()[-1])
        assert (tokens >= 4096) == (free == 14_000)
        _plan(free * MIB, pages=tokens // 16).check()
        assert _plan(free * MIB, pages=tokens // 16 + 1).total > plan.budget


def test_without_a_setting_the_cache_takes_what_fits(
    fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(memory_fraction=1.0)
    needed = plan_memory(fp32, replace(settings, kv_cache_tokens=1600), 8).total - fp32.info.weight_bytes
    # At least one sequence of max_model_len; if that doesn't fit, the plan is refused.
    for free, tokens in ((1 << 40, 8 * 512), (needed, 1600), (0, 512)):
        monkeypatch.setattr(memory_plan, "free_bytes", lambda device, free=free: free)
        plan = plan_memory(fp32, settings, 8)
        assert plan.shape.tokens == tokens
        if free:
            plan.check()
    assert caplog.messages[0] == "the KV cache has 1600 tokens, not 4096: no more fit into the memory"
    with pytest.raises(OutOfMemoryPlan):
        plan.check()


def test_without_a_setting_the_context_is_reduced_to_what_fits(
    fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long = replace(fp32, max_model_len=100_000)
    needed = plan_memory(long, Settings(kv_cache_tokens=100_000), 2).total - long.info.weight_bytes
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: needed // 3)
    assert engine_of(long, 2, memory_fraction="1.0").max_model_len == 25_000
    assert caplog.messages[-1] == "max_model_len is 25000, not 100000: no more fit into the memory"
    # Dynamic RoPE depends on it.
    config = copy.deepcopy(fp32.config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(OutOfMemoryPlan, match="lower max_model_len"):
        plan_memory(replace(long, config=config), Settings(memory_fraction=1.0), 2).check()
    with pytest.raises(OutOfMemoryPlan):
        plan_memory(long, Settings(memory_fraction=1.0, max_model_len=100_000), 2).check()


def test_a_long_context_does_not_multiply_the_default_cache(fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1 << 40)
    long = replace(fp32, max_model_len=100_000)
    assert plan_memory(long, Settings(), 8).shape.tokens == 100_000
    assert plan_memory(long, Settings(), 32).shape.tokens == 32 * 4096


def test_the_default_cache_is_bounded_by_the_weights_or_a_gibibyte(
    fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1 << 40)
    long = replace(fp32, max_model_len=4096)
    slots, page = 256, 16 * long.cache_shape(1).bytes_per_token
    for weights, limit in ((1, 1 << 30), (300 * MIB, 1200 * MIB)):
        checkpoint = replace(long, info=replace(long.info, weight_bytes=weights))
        assert plan_memory(checkpoint, Settings(), slots).shape.pages == limit // page
        assert plan_memory(checkpoint, Settings(kv_cache_tokens=1 << 20), slots).shape.tokens == 1 << 20


def test_an_engine_that_does_not_fit_is_refused_before_it_allocates(fp32: LoadedModel) -> None:
    """A cache of terabytes, whose allocation would fail with another error."""
    with pytest.raises(OutOfMemoryPlan, match=r"memory plan on cpu: .* does not fit; "):
        engine_of(replace(fp32, max_model_len=1 << 30), 8, max_model_len="1048576")


def test_the_figures_are_what_is_allocated(fp32: LoadedModel) -> None:
    engine = engine_of(fp32, 3)
    plan, batch, vocabulary = engine.plan, engine._batch, fp32.config.vocab_size
    cache = runner_of(engine).cache
    assert plan.weights == fp32.info.weight_bytes
    assert plan.cache == cache.keys.nbytes + cache.values.nbytes
    histories = [value for value in vars(batch.sampling).values() if getattr(value, "shape", ()) == (3, vocabulary)]
    assert plan.sampling == sum(history.nbytes for history in histories)
    assert plan.reserve > 64 * MIB
    assert (plan.fraction, plan.device) == (0.9, "cpu")


def test_scores_with_a_soft_cap_are_reserved(fp32: LoadedModel) -> None:
    capped = replace(fp32, architecture=replace(fp32.architecture, attention_softcap=50.0))
    plans = [plan_memory(checkpoint, Settings(), 2).reserve for checkpoint in (capped, fp32)]
    # Scores of a prefill pass, their softmax and its sum in float32.
    assert plans[0] - plans[1] == fp32.architecture.heads * 512 * fp32.max_model_len * 12


def test_exact_products_on_a_gpu_reserve_their_sums(int8: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(LoadedModel, "attention_reserve", lambda *_: 0)
    on_gpu = replace(int8, info=replace(int8.info, device=torch.device("cuda")))
    plans = [plan_memory(checkpoint, Settings(cuda_graphs="off"), 4).reserve for checkpoint in (on_gpu, int8)]
    # Of gate and up: two int32 terms, their float64 sum and the float32 result, where a CPU has two int32 terms of one.
    assert plans[0] - plans[1] == 512 * int8.config.intermediate_size * (2 * 20 - 8)


@pytest.mark.parametrize("cache", [torch.float32, torch.int8])
def test_attention_reserves_what_it_copies(fp32: LoadedModel, cache: torch.dtype) -> None:
    """Of an INT8 cache, the pages are copied before they are widened."""
    shape = replace(fp32.cache_shape(3), dtype=cache)
    masked = replace(fp32, info=replace(fp32.info, device=torch.device("cuda")))
    held = torch.ones(3, shape.max_model_len, dtype=torch.bool)
    keys, _ = KVCache(shape, torch.device("cpu")).gather(0, torch.arange(3), held, torch.float32)
    of_pages = keys.numel() if cache == torch.int8 else 0
    assert masked.attention_reserve(shape) == 2 * (keys.nbytes + of_pages)
    # A CPU attends to one sequence at a time.
    assert fp32.attention_reserve(shape) == masked.attention_reserve(shape) // 3
    assert replace(masked, attention=attention_by_sequence).attention_reserve(shape) == 0


def test_the_reserve_has_the_scratch_of_the_compiled_kernels(
    int8: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiled_kernels()
    engine = engine_of(int8, 3)
    assert isinstance(engine._model, CpuRunner)
    forward = engine._model._forward
    values = (*vars(forward).values(), forward.cache.page_table)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    tensors += [tensor for rows in forward.quantized for tensor in rows.tensors]
    scratch = int8.attention_reserve(engine.plan.shape)
    assert 0 <= scratch - sum(tensor.nbytes for tensor in tensors) < 1000
    monkeypatch.setattr(LoadedModel, "attention_reserve", lambda *_: 0)
    assert engine.plan.reserve - plan_memory(int8, Settings(), 3).reserve == scratch
