"""The memory plan: its figures are what is allocated; a plan that does not fit is refused with advice that helps."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.engines import engine_of
from llama_engine.errors import OutOfMemoryPlan
from llama_engine.model import memory_plan
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import MemoryPlan, activation_reserve, free_bytes, plan_memory
from llama_engine.sampling.sampler import SamplingState
from llama_engine.settings import Settings

MIB = 1 << 20
SHAPE = KVCacheShape(layers=32, slots=32, key_value_heads=8, max_model_len=4096, head_dim=128, dtype=torch.float16)


def plan_of(slots: int, free: int) -> MemoryPlan:
    shape = replace(SHAPE, slots=slots)
    sampling = SamplingState.bytes_for(slots, 128_256)
    return MemoryPlan(8000 * MIB, shape.bytes, sampling, 700 * MIB, free, 0.9, "cuda:0", shape)


def test_a_plan_fits_to_the_byte() -> None:
    plan = replace(plan_of(32, free=0), fraction=1.0)
    needed = plan.total - plan.weights
    replace(plan, free=needed).check()
    with pytest.raises(OutOfMemoryPlan):
        replace(plan, free=needed - 1).check()


def test_a_refused_plan_advises_the_largest_number_of_slots_that_fits() -> None:
    plan = plan_of(32, free=14_000 * MIB)
    with pytest.raises(OutOfMemoryPlan) as refused:
        plan.check()
    message = str(refused.value)
    assert message.startswith(plan.describe())
    advice = re.search(r"does not fit; lower slots to (\d+) or max_model_len below 4096$", message)
    assert advice
    slots = int(advice[1])
    assert 1 <= slots < 32
    plan_of(slots, free=14_000 * MIB).check()
    with pytest.raises(OutOfMemoryPlan):
        plan_of(slots + 1, free=14_000 * MIB).check()


def test_fewer_slots_are_not_advised_where_not_even_one_fits() -> None:
    with pytest.raises(OutOfMemoryPlan, match="does not fit; lower max_model_len or prefill_tokens, or take a smaller"):
        plan_of(32, free=800 * MIB).check()


def test_the_log_has_every_figure() -> None:
    assert plan_of(32, free=30_000 * MIB).describe() == (
        "memory plan on cuda:0: weights 8,000 MiB + cache 16,384 MiB (32 slots x 4096 tokens x 131072 B) + "
        "sampling 20 MiB + reserve 700 MiB = 25,104 MiB of 34,200 MiB (90% of 38,000 MiB)"
    )


def test_an_engine_that_does_not_fit_is_refused_before_it_allocates(fp32: Checkpoint) -> None:
    """A cache of terabytes, whose allocation would fail with another error."""
    with pytest.raises(OutOfMemoryPlan, match=r"memory plan on cpu: .* does not fit; "):
        engine_of(replace(fp32, max_model_len=1 << 30), 8)


def test_the_figures_are_those_of_the_model(fp32: Checkpoint) -> None:
    plan, config = engine_of(fp32, 3).plan, fp32.config
    per_token = 2 * config.num_hidden_layers * (config.num_key_value_heads or 0) * (config.head_dim or 0) * 4
    assert plan.weights == fp32.info.weight_bytes
    assert plan.cache == 3 * fp32.max_model_len * per_token
    assert plan.sampling == 3 * config.vocab_size * 5
    assert plan.reserve > 64 * MIB
    assert (plan.fraction, plan.device) == (0.9, "cpu")


@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
def test_the_reserve_has_room_for_the_largest_widened_weight_of_the_decoder(vocabulary: int) -> None:
    """Llama-2-7B's shape in FP16; the head stays unquantized, however large."""
    narrow, wide = (activation_reserve(512, 32, 4096, 11_008, vocabulary, 2, widens) for widens in (False, True))
    assert wide - narrow == 4096 * 11_008 * 2


@pytest.mark.parametrize(
    ("quantization", "device", "rounds", "widens"),
    [
        ("int8", "cuda", False, True),
        ("int8", "cuda", True, False),
        ("int8", "cpu", False, False),
        ("none", "cuda", False, False),
    ],
)
def test_only_unrounded_int8_on_a_gpu_reserves_a_widened_weight(
    quantization: str,
    device: str,
    rounds: bool,
    widens: bool,
    fp32: Checkpoint,
    int8: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1 << 40)
    settings, config = Settings.parse({}, {}), fp32.config
    loaded = {"none": fp32, "int8": int8}[quantization]
    info = replace(loaded.info, device=torch.device(device), rounds_activations=rounds)
    reserve = plan_memory(replace(loaded, info=info), settings, 4).reserve
    widened = config.hidden_size * config.intermediate_size * info.dtype.itemsize
    assert reserve - plan_memory(fp32, settings, 4).reserve == widened * widens


def test_the_sampler_holds_what_is_planned() -> None:
    held = vars(SamplingState(7, 1000, torch.device("cpu"))).values()
    large = [value.nbytes for value in held if isinstance(value, torch.Tensor) and value.shape == (7, 1000)]
    assert sum(large) == SamplingState.bytes_for(7, 1000)


def test_free_memory_is_less_than_the_machine_has() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < free_bytes(torch.device("cpu")) < total
