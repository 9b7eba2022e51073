"""The limit reproduces figures computed by hand, and no load is promised more than the hardware can do."""

from collections.abc import Sequence

import pytest
from transformers import LlamaConfig

from perf.roofline.physics import Limit, best, bytes_per_step
from perf.roofline.rates import DeviceRates, Weights
from perf.roofline.shape import Formats, LlamaShape

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

CONTEXT = 300
TOKENS = 200

# One layer of one head, so that every figure fits into a head: 4 x 2 x 2 in attention, 3 x 2 x 3 in the MLP, 2 x 5 in
# the head; a position of the cache is 2 keys and 2 values.
TINY = LlamaConfig(
    hidden_size=2,
    intermediate_size=3,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=5,
)


def _requests_per_second(rates: DeviceRates, weights: Weights, rows: int) -> float:
    size = bytes_per_step(LLAMA_2_7B, weights, "cuda", rows, CONTEXT)
    return rows / (TOKENS * size / rates.read(size))


def test_llama_2_7b_has_other_bytes_than_it_has() -> None:
    shape = LlamaShape.of(LLAMA_2_7B)
    assert shape.weight_bytes(Formats.of("fp16", "cuda")) == pytest.approx(13.2e9, rel=0.002)
    assert shape.weight_bytes(Formats.of("int8", "cuda")) == pytest.approx(6.74e9, rel=0.002)
    assert shape.cached_bytes(Formats.of("fp16", "cuda")) == shape.cached_bytes(Formats.of("int8", "cuda")) == 1 << 19


def test_the_founding_articles_hardware_is_said_to_do_more_than_it_can() -> None:
    assert 1 / _requests_per_second(A10G, "fp16", 1) == pytest.approx(4.5, abs=0.05)
    assert _requests_per_second(A10G, "fp16", 32) == pytest.approx(5.3, abs=0.05)
    assert _requests_per_second(A10G, "int8", 32) == pytest.approx(8.2, abs=0.05)
    assert _requests_per_second(H100, "fp16", 32) == pytest.approx(26.3, abs=0.05)
    assert _requests_per_second(H100, "int8", 32) == pytest.approx(40.8, abs=0.05)


def test_a_load_at_the_articles_setting_has_another_limit_than_its_steps() -> None:
    """Of 300 positions a row has 100 at its first step and 298 at its last: 199 on average, at 199 steps."""
    limit = best(LLAMA_2_7B, "fp16", A10G, 32, [TOKENS] * 32, CONTEXT - TOKENS)
    assert limit.passes == 200
    assert limit.bytes_per_step == bytes_per_step(LLAMA_2_7B, "fp16", "cuda", 32, 199)
    weights = LlamaShape.of(LLAMA_2_7B).weight_bytes(Formats.of("fp16", "cuda"))
    assert limit.seconds == pytest.approx((200 * weights + 199 * 32 * 199 * (1 << 19)) / 600e9)
    assert limit.tokens_per_second == pytest.approx(32 * 200 / limit.seconds)
    assert limit.bound_by == "bandwidth"


@pytest.mark.parametrize(
    ("weights", "device", "expected"),
    [("fp32", "cpu", 4 * 34 + 4 * 10), ("fp16", "cpu", 2 * 34 + 2 * 10), ("int8", "cpu", 34 + 4 * 16 + 4 * 10)],
)
def test_a_format_is_counted_in_other_bytes_on_a_cpu(weights: Weights, device: str, expected: int) -> None:
    """INT8 has a scale of four bytes for each of its 2 x 7 + 2 rows, and its head in what is computed in."""
    assert LlamaShape.of(TINY).weight_bytes(Formats.of(weights, device)) == expected


def test_heads_that_share_keys_and_values_are_counted_as_if_they_did_not() -> None:
    config = LlamaConfig(**{**TINY.to_dict(), "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4})
    shape = LlamaShape.of(config)
    assert shape.cached == 2 * 4
    assert shape.matrices == 2 * 2 * 8 + 2 * 2 * 4 + 3 * 2 * 3
    assert shape.attended == 2 * 2 * 8


def test_tied_embeddings_change_what_a_step_reads() -> None:
    tied = LlamaConfig(**{**TINY.to_dict(), "tie_word_embeddings": True})
    assert LlamaShape.of(tied) == LlamaShape.of(TINY)


def _tiny(rows: int, requests: Sequence[int], prompt: int, bandwidth: float, operations: float) -> Limit:
    return best(TINY, "fp32", DeviceRates("cpu", 1, {1: bandwidth}, {"fp32": operations}), rows, requests, prompt)


def test_a_step_bound_by_bandwidth_takes_another_time_than_its_bytes() -> None:
    """One request of 3 tokens after 2: three passes over 176 bytes, two steps over 2 and 3 positions of 16 bytes."""
    limit = _tiny(rows=1, requests=[3], prompt=2, bandwidth=100.0, operations=1e9)
    assert limit.seconds == pytest.approx((3 * 176 + (2 + 3) * 16) / 100)
    assert limit.bytes_per_step == 176 + 40
    assert limit.step_seconds == pytest.approx(2.16)
    assert limit.bound_by == "bandwidth"


def test_a_load_bound_by_operations_takes_another_time_than_its_operations() -> None:
    """Two requests of 2 tokens after 2: 4 prompt tokens and 2 decoded ones, 4 times the head, attention over 2 x 3
    positions of the prompts and 2 x 3 of the steps.
    """
    limit = _tiny(rows=2, requests=[2, 2], prompt=2, bandwidth=1e9, operations=10.0)
    operations = 2 * 34 * 6 + 2 * 10 * 4 + 8 * (6 + 6)
    assert limit.seconds == pytest.approx(operations / 10)
    assert limit.prefill_seconds == pytest.approx((2 * 34 * 4 + 2 * 10 * 2 + 8 * 6) / 10)
    assert limit.operations_per_step == 2 * (2 * 34 + 2 * 10 + 8 * 3)
    assert limit.bound_by == "operations"


def test_rows_that_one_long_request_leaves_empty_are_counted_as_taken() -> None:
    assert _tiny(rows=8, requests=[4] * 8, prompt=2, bandwidth=1.0, operations=1e9).passes == 4
    assert _tiny(rows=8, requests=[2] * 7 + [100], prompt=2, bandwidth=1.0, operations=1e9).passes == 100


def test_more_rows_than_a_step_may_have_share_a_reading() -> None:
    assert _tiny(rows=2, requests=[3] * 4, prompt=2, bandwidth=1.0, operations=1e9).passes == 1 + 4


@pytest.mark.parametrize(("rows", "requests", "prompt"), [(0, [1], 1), (1, [], 1), (1, [1, 0], 1), (1, [1], 0)])
def test_a_load_of_nothing_has_a_limit(rows: int, requests: list[int], prompt: int) -> None:
    with pytest.raises(ValueError, match=f"rows is {rows}, prompt_tokens {prompt}, output tokens"):
        _tiny(rows, requests, prompt, 1.0, 1.0)


def test_requests_of_one_token_need_a_step() -> None:
    limit = _tiny(rows=2, requests=[1, 1], prompt=2, bandwidth=1.0, operations=1e9)
    assert limit.passes == 1
    assert limit.seconds == pytest.approx(176)


def test_the_fraction_beside_a_figure_is_not_of_its_limit() -> None:
    limit = _tiny(rows=1, requests=[3], prompt=2, bandwidth=100.0, operations=1e9)
    beside = limit.beside(limit.tokens_per_second / 4)
    assert beside == {
        "tokens_per_second": round(limit.tokens_per_second, 1),
        "fraction": 0.25,
        "bound_by": "bandwidth",
    }
