"""The roofline reproduces figures computed by hand, and a device's measured rates bound it."""

import json
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import LlamaConfig

from perf.roofline import device
from perf.roofline.device import CPU_SIZES, measure_rates
from perf.roofline.physics import Costs, Roofline, roofline
from perf.roofline.rates import DeviceRates, Weights

LLAMA_2_7B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32000,
)
A10G = DeviceRates("cuda", 1, {1 << 30: 600e9}, {"fp32": 31e12, "fp16": 125e12, "int8": 250e12})
H100 = DeviceRates("cuda", 1, {1 << 30: 3.0e12}, {"fp32": 60e12, "fp16": 900e12, "int8": 1800e12})
MEASURED = DeviceRates("cpu", 2, {10: 50.0, 20: 20.0, 40: 21.0}, {"fp32": 95.0, "fp16": 11.0, "int8": 3.0})
CONTEXT, TOKENS = 300, 200

# One layer of one head: 4 x 2 x 2 in attention, 3 x 2 x 3 in the MLP, 2 x 5 in the head; a cached position has 2 keys
# and 2 values. In FP32 a pass reads 4 x 34 + 4 x 10 = 176 bytes of weights, and 16 for each cached position.
TINY = LlamaConfig(
    hidden_size=2,
    intermediate_size=3,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=5,
)


def tiny(rows: int, requests: Sequence[int], prompt: int, bandwidth: float, operations: float) -> Roofline:
    rates = DeviceRates("cpu", 1, {1: bandwidth}, {"fp32": operations})
    return roofline(TINY, "fp32", rates, rows, requests, prompt)


@pytest.mark.parametrize(
    ("rates", "weights", "rows", "requests_per_second"),
    [
        (A10G, "fp16", 1, 1 / 4.5),
        (A10G, "fp16", 32, 5.3),
        (A10G, "int8", 32, 8.2),
        (H100, "fp16", 32, 26.3),
        (H100, "int8", 32, 40.8),
    ],
)
def test_a_llama_2_7b_answers_at_most_the_documented_requests_per_second(
    rates: DeviceRates, weights: Weights, rows: int, requests_per_second: float
) -> None:
    costs = Costs(LLAMA_2_7B, weights, rates)
    assert costs.weight_bytes == pytest.approx({"fp16": 13.2e9, "int8": 6.74e9}[weights], rel=0.002)
    assert costs.cached_bytes == 1 << 19
    size = costs.weight_bytes + rows * CONTEXT * costs.cached_bytes
    found = rows / (TOKENS * size / rates.read(size))
    assert found == pytest.approx(requests_per_second, rel=0.011 if rows == 1 else 0, abs=0 if rows == 1 else 0.05)


@pytest.mark.parametrize(
    ("weights", "expected"),
    # INT8 has a scale of four bytes for each of its 2 x 7 + 2 rows and the head's 5, and a cache in BF16.
    [
        ("fp32", (4 * 34 + 4 * 10, 16)),
        ("fp16", (2 * 34 + 2 * 10, 8)),
        ("bf16", (2 * 34 + 2 * 10, 8)),
        ("int8", (34 + 10 + 4 * (16 + 5), 8)),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_each_format_has_its_bytes_on_a_cpu(weights: Weights, expected: tuple[int, int], tied: bool) -> None:
    config = LlamaConfig(**{**TINY.to_dict(), "tie_word_embeddings": tied})
    costs = Costs(config, weights, MEASURED)
    assert (costs.weight_bytes, costs.cached_bytes) == expected


def test_attention_beside_an_int8_head_has_the_rate_of_floats() -> None:
    rates = DeviceRates("cpu", 1, {1: 1.0}, {"fp32": 2.0, "int8": 20.0})
    assert Costs(TINY, "int8", rates).computing(1, 1, positions=1) == pytest.approx(2 * (34 + 10) / 20 + 8 / 2)


def test_w8a8_keeps_its_head_in_floats() -> None:
    costs = Costs(TINY, "int8", MEASURED, "fp32")
    assert (costs.weight_bytes, costs.cached_bytes) == (34 + 4 * 16 + 4 * 10, 16)
    rates = DeviceRates("cpu", 1, {1: 1.0}, {"fp32": 2.0, "int8": 20.0})
    seconds = Costs(TINY, "int8", rates, "fp32").computing(1, 1, positions=1)
    assert seconds == pytest.approx(2 * 34 / 20 + (2 * 10 + 8) / 2)


def test_the_compiled_kernels_rate_counts_the_operations_of_both_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a weight of a server with one term, which the limit has, costs two operations of this rate."""

    def best(action: Callable[[], object], *_: object) -> float:
        action()
        return 2.0

    monkeypatch.setattr(device, "_best", best)
    rate = device._compiled(seconds=0.0)
    if rate is None:
        pytest.skip("no CPU kernels")
    assert rate == 2 * (2 * 1024**3) / 2.0


def test_heads_that_share_keys_and_values_are_counted_once() -> None:
    config = LlamaConfig(**{**TINY.to_dict(), "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4})
    rates = DeviceRates("cpu", 1, {1: 1.0}, {"fp32": 1.0})
    costs = Costs(config, "fp32", rates)
    assert costs.cached_bytes == 4 * 2 * 4
    assert costs.weight_bytes == 4 * (2 * 2 * 8 + 2 * 2 * 4 + 3 * 2 * 3 + 10)
    # But every query head attends.
    assert costs.computing(0, 0, positions=1) == 2 * 2 * 8


def test_a_load_bound_by_bandwidth_takes_the_time_of_its_bytes() -> None:
    """One request of 3 tokens after 2: three passes over the weights, two steps over 2 and 3 positions."""
    bound = tiny(rows=1, requests=[3], prompt=2, bandwidth=100.0, operations=1e9)
    assert bound.seconds == pytest.approx((3 * 176 + (2 + 3) * 16) / 100)
    assert bound.step_seconds == pytest.approx((176 + 40) / 100)
    tokens_per_second = round(bound.tokens_per_second, 1)
    beside = {"tokens_per_second": tokens_per_second, "fraction": 0.25, "bound_by": "bandwidth"}
    assert bound.beside(bound.tokens_per_second / 4) == beside


def test_a_load_bound_by_operations_takes_the_time_of_its_operations() -> None:
    """Two requests of 2 tokens after 2: 4 prompt tokens and 2 decoded ones, 4 times the head, attention over 2 x 3
    positions of the prompts and 2 x 3 of the steps.
    """
    bound = tiny(rows=2, requests=[2, 2], prompt=2, bandwidth=1e9, operations=10.0)
    assert bound.seconds == pytest.approx((2 * 34 * 6 + 2 * 10 * 4 + 8 * (6 + 6)) / 10)
    assert bound.step_seconds == pytest.approx(2 * (2 * 34 + 2 * 10 + 8 * 3) / 10)
    assert bound.bound_by == "operations"


@pytest.mark.parametrize(
    ("rows", "requests", "passes", "steady", "positions"),
    [
        (8, [4] * 8, 4, 3, 8 * (2 + 3 + 4)),
        # One long request leaves the other rows empty, unless others follow.
        (8, [2] * 7 + [100], 100, 14, 7 * 2 + sum(range(2, 101))),
        # More requests than rows wait for a pass of their own.
        (2, [3] * 4, 1 + 4, 4, 4 * (2 + 3)),
        # The only token is the prefill's.
        (2, [1, 1], 1, 0, 0),
    ],
)
def test_passes_follow_from_the_rows_lengths(
    rows: int, requests: list[int], passes: int, steady: int, positions: int
) -> None:
    rates = DeviceRates("cpu", 1, {1: 1.0}, {"fp32": 1e9})
    for expected, endless in ((passes, False), (steady, True)):
        bound = roofline(TINY, "fp32", rates, rows, requests, 2, steady=endless)
        # With nothing to read, operations are the bound.
        assert bound.seconds == pytest.approx(expected * 176 + positions * 16, abs=1e-3)


def test_a_size_has_the_rate_of_the_next_smaller_one_or_a_faster_larger_one() -> None:
    rates = {1: 50.0, 10: 50.0, 19: 50.0, 20: 21.0, 39: 21.0, 40: 21.0, 1000: 21.0}
    assert {size: MEASURED.read(size) for size in rates} == rates


def test_a_format_has_the_best_rate_of_any_wider_one() -> None:
    # A narrow format may be widened, where that is faster; a wide one can't be narrowed.
    formats: list[Weights] = ["fp32", "fp16", "bf16", "int8"]
    assert [MEASURED.multiply(one) for one in formats] == [95.0] * 4
    assert [H100.multiply(one) for one in formats] == [60e12, 900e12, 900e12, 1800e12]


def test_rates_survive_a_result_s_file() -> None:
    assert DeviceRates.from_json(json.loads(json.dumps(MEASURED.to_json()))) == MEASURED


def test_a_measurement_has_every_rate() -> None:
    before = torch.get_num_threads()
    rates = measure_rates(threads=1, seconds=0.001)
    assert torch.get_num_threads() == before
    assert (rates.device, rates.threads) == ("cuda" if torch.cuda.is_available() else "cpu", 1)
    if rates.device == "cpu":
        assert tuple(rates.bandwidth) == CPU_SIZES
    assert {"fp32", "fp16", "bf16"} <= set(rates.operations)
    assert all(rate > 0 for rate in (*rates.bandwidth.values(), *rates.operations.values()))
    for size, rate in rates.bandwidth.items():
        assert f"{rate / 1e9:,.1f} at {size / 2**20:,.0f} MiB" in rates.describe()
