"""Products with weights in groups of columns, of 4 and 8 bits, have the reference's bits, whatever runs beside them."""

from dataclasses import replace

import pytest
import torch
from engine.cpu_kernels.models import kernels, llama_of, random_groups, random_tokens, runner, small_llama
from engine.int8_layers import AUTO, each_terms, random_rows, relative_error, rows_with_outliers, threads
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.kernels.activation_terms import TWO_TERMS, ActivationTerms
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.cpu.build import INSTRUCTION_SETS
from llama_engine.kernels.cpu.packing import pack_layer, pack_linear
from llama_engine.kernels.cpu.self_test import run_linear

each_instruction_set = pytest.mark.parametrize("name", INSTRUCTION_SETS)
each_bits = pytest.mark.parametrize("bits", [4, 8])
each_kind = pytest.mark.parametrize("general", [False, True], ids=["scales", "offsets and order"])


def groups(outputs: int, inputs: int, bits: int, size: int, general: bool) -> LinearWeight:
    """Return a random layer with a bias."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    return random_groups(outputs, inputs, bits, size, general, generator, bias=True)


@each_terms
@each_kind
@each_bits
@each_instruction_set
@pytest.mark.parametrize(
    ("outputs", "inputs", "size"),
    [(64, 64, 32), (33, 96, 32), (1, 320, 64), (96, 1024, 128), (17, 5632, 128), (40, 1536, 512), (40, 288, 96)],
)
def test_a_product_has_the_bits_of_the_reference(
    name: str, bits: int, general: bool, outputs: int, inputs: int, size: int, terms: ActivationTerms
) -> None:
    layer, x = groups(outputs, inputs, bits, size, general), rows_with_outliers(37, inputs)
    assert torch.equal(run_linear(kernels(name), x, layer, terms), cpu_reference.linear(x, layer, terms))


@each_kind
@each_bits
def test_a_product_is_near_that_of_the_dequantized_weight(bits: int, general: bool) -> None:
    layer, x = groups(96, 1024, bits, 128, general), random_rows(37, 1024)
    assert layer.bias is not None
    expected = x.double() @ layer.dequantized().double().T + layer.bias.double()
    assert relative_error(run_linear(kernels("avx2"), x, layer, TWO_TERMS), expected) < 1e-4


@each_terms
@each_bits
@each_instruction_set
def test_the_largest_sums_of_a_group_are_exact(name: str, bits: int, terms: ActivationTerms) -> None:
    bound = 2 ** (bits - 1)
    layer = groups(5, 1024, bits, 512, general=True)
    layer.weight[0], layer.weight[1], layer.weight[2] = bound - 1, -bound, 0
    layer.weight[3] = torch.where(torch.arange(1024) % 2 > 0, bound - 1, -bound)
    x = torch.ones(5, 1024)
    x[1], x[2], x[3, 1:] = -1, torch.arange(1024) % 2 * 2.0 - 1, 126.5 / 127  # high 126, low 127
    x[4] = 0
    assert torch.equal(run_linear(kernels(name), x, layer, terms), cpu_reference.linear(x, layer, terms))


@each_bits
@each_instruction_set
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str, bits: int) -> None:
    layer, x = groups(80, 256, bits, 32, general=True), rows_with_outliers(99, 256)
    together = run_linear(kernels(name), x, layer, AUTO)
    for rows in (1, 2, 3, 5, 6, 7, 13, 64, 97):
        for count in (1, 2):
            with threads(count):
                assert torch.equal(run_linear(kernels(name), x[99 - rows :], layer, AUTO), together[99 - rows :])


@each_bits
@each_instruction_set
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_nan_in_its_own_row_alone(name: str, bits: int, value: float) -> None:
    layer, x = groups(64, 128, bits, 64, general=True), rows_with_outliers(9, 128)
    expected = run_linear(kernels(name), x, layer, AUTO)
    x[4, 77] = value
    result = run_linear(kernels(name), x, layer, AUTO)
    assert result[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(result[others], expected[others])


@each_instruction_set
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_a_llama_in_groups_are_near_the_reference(name: str, bias: bool) -> None:
    llama, tokens = small_llama(bias=bias, grouped=True), random_tokens(40, 0)
    result, expected = runner(name, llama, torch.float32, TWO_TERMS).logits(tokens, 0, 0), llama.reference(tokens)
    assert (result - expected).abs().max() <= 3e-4 * expected.abs().max()


@each_instruction_set
def test_any_cut_of_a_prefill_gives_the_same_bits(name: str) -> None:
    llama, tokens = small_llama(grouped=True), random_tokens(50, 0)
    whole = runner(name, llama).logits(tokens, 0, 0)
    for size in (1, 3, 17, 49):
        run = runner(name, llama)
        assert torch.equal(torch.cat([run.logits(tokens[at : at + size], 2, at) for at in range(0, 50, size)]), whole)


@each_instruction_set
def test_sequences_in_one_batch_have_the_bits_of_each_alone(name: str) -> None:
    llama, lengths = small_llama(grouped=True), (1, 15, 33)
    sequences = [random_tokens(length, length) for length in lengths]
    alone = [runner(name, llama).logits(tokens, 0, 0) for tokens in sequences]
    slots = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    assert torch.equal(runner(name, llama).logits(torch.cat(sequences), slots, positions), torch.cat(alone))


@each_instruction_set
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(runner(name, small_llama(grouped=True)).logits(random_tokens(50, 0), 1, 0))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_all_instruction_sets_give_the_same_bits() -> None:
    llama = small_llama(grouped=True)
    results = [runner(name, llama).logits(random_tokens(50, 0), 1, 0) for name in INSTRUCTION_SETS]
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("count", [1, 7, 64, 96])
def test_groups_of_other_sizes_are_refused(count: int) -> None:
    layer = LinearWeight(torch.zeros(2, 1536, dtype=torch.int8), torch.ones(2, count))
    with pytest.raises(ValueError, match=f"1536 columns has {count} groups, and the CPU kernels take groups of a mul"):
        pack_linear(kernels("avx2"), layer)


def test_an_order_that_is_not_a_permutation_is_refused() -> None:
    layer = replace(groups(64, 64, 4, 32, general=True), order=torch.arange(64).clamp(max=62))
    with pytest.raises(ValueError, match="the order of a weight's 64 columns isn't a permutation"):
        pack_linear(kernels("avx2"), layer)


def test_groups_of_heads_that_are_padded_become_rows() -> None:
    llama = small_llama(llama_of(96, 8, 8, 12, 96, 96, 0.2, layers=1), grouped=True)
    assert llama.layers[0].attention_output.group_size == 32
    packed = pack_layer(kernels("avx2"), llama.architecture, llama.layers[0])
    assert packed.attention_output.matrix.groups == 0
    assert packed.gate_up.matrix.groups == 1
