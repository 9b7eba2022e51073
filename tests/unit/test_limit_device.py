"""A device's rates: which one counts for what, and that the real measurement gives rates for all of it."""

import json

import pytest
import torch

from perf.roofline.device import CPU_SIZES, measure
from perf.roofline.rates import DeviceRates

RATES = DeviceRates("cpu", 2, {10: 50.0, 20: 20.0, 40: 21.0}, {"fp32": 95.0, "fp16": 11.0, "int8": 3.0})


@pytest.mark.parametrize(
    ("size", "rate"), [(1, 50.0), (10, 50.0), (19, 50.0), (20, 21.0), (39, 21.0), (40, 21.0), (1000, 21.0)]
)
def test_a_size_has_a_lower_limit_than_more_bytes_were_read_at(size: int, rate: float) -> None:
    """Between two sizes the smaller one's rate counts, unless a larger one was read faster."""
    assert RATES.read(size) == rate


def test_a_narrow_format_is_limited_by_a_product_nobody_has_to_use() -> None:
    assert [RATES.multiply("fp32"), RATES.multiply("fp16"), RATES.multiply("int8")] == [95.0, 95.0, 95.0]


def test_a_wide_format_is_promised_a_narrow_ones_rate() -> None:
    rates = DeviceRates("cuda", 1, {1: 1.0}, {"fp32": 60.0, "fp16": 900.0, "int8": 1800.0})
    assert [rates.multiply("fp32"), rates.multiply("fp16"), rates.multiply("int8")] == [60.0, 900.0, 1800.0]


def test_rates_change_on_their_way_through_a_results_file() -> None:
    assert DeviceRates.from_json(json.loads(json.dumps(RATES.to_json()))) == RATES


def test_a_measurement_leaves_something_out_or_the_threads_changed() -> None:
    before = torch.get_num_threads()
    rates = measure(threads=1, seconds=0.001)
    assert torch.get_num_threads() == before
    assert (rates.device, rates.threads) == ("cuda" if torch.cuda.is_available() else "cpu", 1)
    if rates.device == "cpu":
        assert tuple(rates.bandwidth) == CPU_SIZES
    assert {"fp32", "fp16"} <= set(rates.operations)
    assert all(rate > 0 for rate in (*rates.bandwidth.values(), *rates.operations.values()))
    for size, rate in rates.bandwidth.items():
        assert f"{rate / 1e9:,.1f} at {size / 2**20:,.0f} MiB" in rates.describe()


def test_no_threads_are_measured() -> None:
    with pytest.raises(ValueError, match="threads is 0; it must be at least 1"):
        measure(threads=0)
