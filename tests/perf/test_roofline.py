"""The roofline reproduces figures computed by hand, and a device's measured rates bound it."""

from collections.abc import Sequence

import pytest
from transformers import LlamaConfig

from perf.roofline import DeviceRates, Roofline, Weights, roofline

MEASURED = DeviceRates("cpu", 2, {10: 50.0, 20: 20.0, 40: 21.0}, {"fp32": 95.0, "fp16": 11.0, "int8": 3.0})
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


def tiny(sequences: int, requests: Sequence[int], prompt: int, bandwidth: float, operations: float) -> Roofline:
    rates = DeviceRates("cpu", 1, {1: bandwidth}, {"fp32": operations})
    return roofline(TINY, "fp32", rates, sequences, requests, prompt)


@pytest.mark.parametrize(
    ("weights", "weight_bytes", "cached_bytes"),
    # INT8 has a scale of four bytes for each of its 2 x 7 + 2 channels and the head's 5, and a cache in BF16.
    [("fp32", 4 * 34 + 4 * 10, 16), ("fp16", 2 * 34 + 2 * 10, 8), ("int8", 34 + 10 + 4 * (16 + 5), 8)],
)
def test_each_format_has_its_bytes_on_a_cpu(weights: Weights, weight_bytes: int, cached_bytes: int) -> None:
    """One request of 2 tokens after 3: a step over 3 positions."""
    bound = roofline(TINY, weights, DeviceRates("cpu", 2, {1: 1.0}, {"fp32": 1e12}), 1, [2], 3)
    assert bound.seconds == weight_bytes + 3 * cached_bytes


def test_a_load_bound_by_bandwidth_takes_the_time_of_its_bytes() -> None:
    """One request of 3 tokens after 2: two steps, over 2 and 3 positions."""
    bound = tiny(sequences=1, requests=[3], prompt=2, bandwidth=100.0, operations=1e9)
    assert bound.seconds == pytest.approx((2 * 176 + (2 + 3) * 16) / 100)
    beside = bound.beside(bound.tokens_per_second / 4)
    assert (beside["fraction"], beside["bound_by"]) == (0.25, "bandwidth")


def test_a_load_bound_by_operations_takes_the_time_of_its_operations() -> None:
    """Two requests of 2 tokens after 2: 4 prompt tokens and 2 decoded ones, 4 times the head, attention over 2 x 3
    positions of the prompts and 2 x 3 of the steps.
    """
    bound = tiny(sequences=2, requests=[2, 2], prompt=2, bandwidth=1e9, operations=10.0)
    assert bound.seconds == pytest.approx((2 * 34 * 6 + 2 * 10 * 4 + 8 * (6 + 6)) / 10)
    assert bound.bound_by == "operations"


@pytest.mark.parametrize(
    ("sequences", "requests", "passes", "positions"),
    [
        (8, [4] * 8, 3, 8 * (2 + 3 + 4)),
        # While one request is long, others follow at the other sequences' places.
        (8, [2] * 7 + [100], 14, 7 * 2 + sum(range(2, 101))),
        # More requests than sequences wait for a pass of their own.
        (2, [3] * 4, 4, 4 * (2 + 3)),
        # The only token is the prefill's.
        (2, [1, 1], 0, 0),
    ],
)
def test_passes_follow_from_the_requests_lengths(
    sequences: int, requests: list[int], passes: int, positions: int
) -> None:
    bound = tiny(sequences, requests, 2, bandwidth=1.0, operations=1e9)
    # With nothing to read, operations are the bound.
    assert bound.seconds == pytest.approx(passes * 176 + positions * 16, abs=1e-3)
