"""The memory plan: its figures are what is allocated; a plan that does not fit is refused with advice that helps."""

import re
from dataclasses import replace

import pytest
import torch
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import attention_by_sequence, engine_of, runner_of
from llama_engine.errors import OutOfMemoryPlan
from llama_engine.model import memory_plan
from llama_engine.model.cpu_runner import CpuRunner
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import MemoryPlan, fitting_slots, plan_memory
from llama_engine.sampling.sampling_state import SamplingState
from llama_engine.settings import Settings

MIB = 1 << 20
SHAPE = KVCacheShape(layers=32, slots=32, key_value_heads=8, max_model_len=4096, head_dim=128, dtype=torch.float16)


def _plan(slots: int, free: int, fraction: float = 0.9) -> MemoryPlan:
    shape = replace(SHAPE, slots=slots)
    sampling = SamplingState.bytes_for(slots, 128_256)
    return MemoryPlan(8000 * MIB, shape.bytes, sampling, 700 * MIB, free, fraction, "cuda:0", shape)


def test_a_plan_fits_to_the_byte() -> None:
    needed = _plan(32, 0).total - _plan(32, 0).weights
    _plan(32, needed, fraction=1.0).check()
    with pytest.raises(OutOfMemoryPlan):
        _plan(32, needed - 1, fraction=1.0).check()


@pytest.mark.parametrize(
    ("free", "advice"),
    [
        (14_000, "lower slots to 21 or max_model_len below 4096"),
        # Not even one slot fits.
        (800, "lower max_model_len or prefill_tokens, or take a smaller or more strongly quantized checkpoint"),
    ],
)
def test_a_refused_plan_advises_the_largest_number_of_slots_that_fits(free: int, advice: str) -> None:
    plan = _plan(32, free * MIB)
    with pytest.raises(OutOfMemoryPlan, match=rf"^{re.escape(plan.describe())}: does not fit; {advice}$"):
        plan.check()
    fitting = [slots for slots in range(1, 32) if _plan(slots, free * MIB).total <= plan.budget]
    assert max(fitting, default=0) == (21 if free == 14_000 else 0)


@pytest.mark.parametrize(("free", "expected"), [(3, 3), (100, 8), (0, 1)])
def test_without_a_setting_as_many_slots_as_fit_are_used(
    fp32: Checkpoint, free: int, expected: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(memory_fraction=1.0)
    needed = plan_memory(fp32, settings, max(free, 1)).total - fp32.info.weight_bytes
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: needed if free else 0)
    assert fitting_slots(fp32, settings, 8) == expected
    lines = ["3 slots, not 8 (max_batch_size): no more fit into the memory"] if expected == 3 else []
    assert caplog.messages == lines
    assert fitting_slots(fp32, Settings(slots=5), 8) == 5


def test_an_engine_that_does_not_fit_is_refused_before_it_allocates(fp32: Checkpoint) -> None:
    """A cache of terabytes, whose allocation would fail with another error."""
    with pytest.raises(OutOfMemoryPlan, match=r"memory plan on cpu: .* does not fit; "):
        engine_of(replace(fp32, max_model_len=1 << 30), 8)


def test_the_figures_are_what_is_allocated(fp32: Checkpoint) -> None:
    engine = engine_of(fp32, 3)
    plan, batch, vocabulary = engine.plan, engine._batch, fp32.config.vocab_size
    cache = runner_of(engine).kv_cache
    assert plan.weights == fp32.info.weight_bytes
    assert plan.cache == cache.keys.nbytes + cache.values.nbytes
    histories = [value for value in vars(batch.sampling).values() if getattr(value, "shape", ()) == (3, vocabulary)]
    assert plan.sampling == sum(history.nbytes for history in histories)
    assert plan.reserve > 64 * MIB
    assert (plan.fraction, plan.device) == (0.9, "cpu")


@pytest.mark.parametrize(("precision", "factor"), [("int8", 1), ("fp32", 0)])
def test_exact_products_on_a_gpu_reserve_their_sums(
    precision: str, factor: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(Checkpoint, "attention_reserve", lambda *_: 0)
    loaded: Checkpoint = request.getfixturevalue(precision)
    on_gpu = replace(loaded, info=replace(loaded.info, device=torch.device("cuda")))
    settings = Settings(cuda_graphs="off")
    reserve, on_cpu = (plan_memory(checkpoint, settings, 4).reserve for checkpoint in (on_gpu, loaded))
    # Of gate and up: two int32 terms, their float64 sum and the float32 result, where a CPU has two int32 terms of one.
    assert reserve - on_cpu == factor * 512 * loaded.config.intermediate_size * (2 * 20 - 8)


@pytest.mark.parametrize(
    ("cache", "copies"),
    # Of an INT8 cache, the product with the scales is half as much again.
    [(torch.float32, 2), (torch.int8, 3)],
)
def test_a_masked_decode_step_on_a_gpu_reserves_what_it_gathers(
    fp32: Checkpoint, cache: torch.dtype, copies: int
) -> None:
    shape = replace(fp32.cache_shape(3), dtype=cache)
    masked = replace(fp32, info=replace(fp32.info, device=torch.device("cuda")))
    held = torch.ones(3, shape.positions, dtype=torch.bool)
    keys, _ = KVCache(shape, torch.device("cpu")).gather(0, torch.arange(3), held, torch.float32)
    assert masked.attention_reserve(shape) == copies * keys.nbytes
    fused = replace(masked, attention=attention_by_sequence)
    assert fused.attention_reserve(shape) == fp32.attention_reserve(shape) == 0


def test_the_reserve_has_the_scratch_of_the_compiled_kernels(int8: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiled_kernels()
    engine = engine_of(int8, 3)
    assert isinstance(engine._model, CpuRunner)
    forward = engine._model._forward
    tensors = [value for value in vars(forward).values() if isinstance(value, torch.Tensor)]
    tensors += [tensor for rows in forward.quantized for tensor in rows.tensors]
    scratch = int8.attention_reserve(engine.plan.shape)
    assert 0 <= scratch - sum(tensor.nbytes for tensor in tensors) < 1000
    monkeypatch.setattr(Checkpoint, "attention_reserve", lambda *_: 0)
    assert engine.plan.reserve - plan_memory(int8, Settings(), 3).reserve == scratch
