"""The memory plan: its figures are what is allocated, and one that doesn't fit is refused with advice that helps."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.engines import engine_of
from llama_engine.errors import OutOfMemoryPlan
from llama_engine.model import memory_plan as memory
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.model.memory_plan import MemoryPlan, activation_reserve, free_bytes, plan_memory
from llama_engine.sampling.sampler import Sampler
from llama_engine.settings import Settings

MIB = 1 << 20
SHAPE = KVCacheShape(layers=32, slots=32, key_value_heads=8, max_model_len=4096, head_dim=128, dtype=torch.float16)


def _plan(slots: int, free: int, max_model_len: int = 4096, weights: int = 8000 * MIB) -> MemoryPlan:
    shape = replace(SHAPE, slots=slots, max_model_len=max_model_len)
    sampling = Sampler.bytes_for(slots, 128_256)
    return MemoryPlan(weights, shape.bytes, sampling, 700 * MIB, free, 0.9, "cuda:0", shape)


def test_a_plan_that_just_fits_is_refused_or_one_byte_more_is_not() -> None:
    plan = replace(_plan(32, free=0), fraction=1.0)
    needed = plan.total - plan.weights
    replace(plan, free=needed).check()
    with pytest.raises(OutOfMemoryPlan):
        replace(plan, free=needed - 1).check()


def test_the_advice_does_not_help_or_asks_for_too_much() -> None:
    plan = _plan(32, free=14_000 * MIB)
    with pytest.raises(OutOfMemoryPlan) as refused:
        plan.check()
    message = str(refused.value)
    assert message.startswith(plan.describe())
    advised = re.search(r"does not fit; lower slots to (\d+) or max_model_len below 4096$", message)
    assert advised
    slots = int(advised[1])
    assert 1 <= slots < 32
    _plan(slots, free=14_000 * MIB).check()
    with pytest.raises(OutOfMemoryPlan):
        _plan(slots + 1, free=14_000 * MIB).check()


def test_lower_slots_are_advised_where_not_even_one_fits() -> None:
    with pytest.raises(OutOfMemoryPlan, match="does not fit; lower max_model_len or prefill_tokens, or take a smaller"):
        _plan(32, free=800 * MIB).check()


def test_a_figure_is_missing_from_the_log() -> None:
    assert _plan(32, free=30_000 * MIB).describe() == (
        "memory plan on cuda:0: weights 8,000 MiB + cache 16,384 MiB (32 slots x 4096 tokens x 131072 B) + "
        "sampling 20 MiB + reserve 700 MiB = 25,104 MiB of 34,200 MiB (90% of 38,000 MiB)"
    )


def test_an_engine_is_made_although_it_does_not_fit_or_allocates_first(fp32: Checkpoint) -> None:
    """A cache of terabytes: allocated first, it would fail in another way."""
    with pytest.raises(OutOfMemoryPlan, match=r"memory plan on cpu: .* does not fit; "):
        engine_of(replace(fp32, max_model_len=1 << 30), 8)


def test_the_plan_of_an_engine_has_other_figures_than_its_model(fp32: Checkpoint) -> None:
    plan, config = engine_of(fp32, 3).plan, fp32.config
    per_token = 2 * config.num_hidden_layers * (config.num_key_value_heads or 0) * (config.head_dim or 0) * 4
    assert plan.weights == fp32.info.weight_bytes
    assert plan.cache == 3 * fp32.max_model_len * per_token
    assert plan.sampling == 3 * config.vocab_size * 5
    assert plan.reserve > 64 * MIB
    assert (plan.fraction, plan.device) == (0.9, "cpu")


def _reserve(vocabulary: int = 32_000, **changes: bool) -> int:
    """What a pass of Llama-2-7B's shape holds in FP16."""
    return activation_reserve(512, 32, 4096, 11_008, vocabulary, itemsize=2, **changes)


def test_a_weight_that_is_widened_is_not_in_the_reserve_or_is_counted_as_another_one() -> None:
    # The largest matrix of the decoder; the head stays unquantized, however large.
    for vocabulary in (32_000, 128_256):
        assert _reserve(vocabulary, widens=True) - _reserve(vocabulary) == 4096 * 11_008 * 2


@pytest.mark.parametrize(
    ("quantization", "device", "rounds", "widens"),
    [
        ("int8", "cuda", False, True),
        ("int8", "cuda", True, False),
        ("int8", "cpu", False, False),
        ("none", "cuda", False, False),
    ],
    ids=["unrounded int8 on a GPU", "rounded", "on a CPU", "unquantized"],
)
def test_a_weight_is_widened_in_no_plan_or_in_one_whose_products_widen_none(
    quantization: str,
    device: str,
    rounds: bool,
    widens: bool,
    fp32: Checkpoint,
    int8: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 40)
    settings, config = Settings.parse({}, {}), fp32.config
    loaded = {"none": fp32, "int8": int8}[quantization]
    info = replace(loaded.info, device=torch.device(device), rounds_activations=rounds)
    planned = plan_memory(replace(loaded, info=info), settings, 4).reserve
    widened = config.hidden_size * config.intermediate_size * info.dtype.itemsize
    assert planned - plan_memory(fp32, settings, 4).reserve == widened * widens


def test_the_sampler_holds_more_than_planned() -> None:
    sampler = Sampler(7, 1000, (2,), torch.device("cpu"))
    held = [value for value in vars(sampler).values() if isinstance(value, torch.Tensor)]
    large = sum(tensor.nbytes for tensor in held if tensor.shape == (7, 1000))
    assert large == Sampler.bytes_for(7, 1000)


def test_free_memory_is_more_than_the_machine_has() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < free_bytes(torch.device("cpu")) < total
