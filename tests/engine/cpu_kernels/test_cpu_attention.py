"""The CPU kernels' attention reads what a query attends to, and nothing beside it changes its bits."""

from collections.abc import Iterable

import pytest
import torch
from engine.cpu_kernels.models import PLAIN, POSITIONS, RUNNABLE, llama_of, peer, runner, small_llama
from engine.cpu_kernels.test_cpu_forward import each_instruction_set
from engine.int8_layers import threads
from llama_engine.checkpoint.architecture import Architecture
from llama_engine.kernels.cache_shape import CPU_PAGE_SIZE


def _attend(name: str, model: Architecture, qkv: torch.Tensor, nan: Iterable[int] = ()) -> torch.Tensor:
    """Return the attention of a sequence's last token after the others'. nan: positions whose values are NaN then."""
    forward, last = runner(name, small_llama(model)).forward, len(qkv) - 1
    forward.attention(qkv[:last], torch.zeros(last, dtype=torch.int64), torch.arange(last))
    values = forward.cache.layers[0][1].view(model.kv_heads, -1, CPU_PAGE_SIZE // 2, model.head_dim, 2)
    for position in nan:
        page, within = divmod(position, CPU_PAGE_SIZE)
        values[:, 1 + page, within // 2, :, within % 2] = torch.nan
    return forward.attention(qkv[last:], torch.zeros(1, dtype=torch.int64), torch.tensor([last]))


def _random_qkv(tokens: int, model: Architecture) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, model.heads + 2 * model.kv_heads, model.head_dim, generator=generator)


@each_instruction_set
@pytest.mark.parametrize("window", [4, 5])
def test_a_window_that_starts_between_two_values_of_a_pair_reads_one(name: str, window: int) -> None:
    model = llama_of(128, 8, 2, 32, 192, 256, 0.2, windows=(window, window))
    qkv = _random_qkv(37, model)
    assert torch.equal(_attend(name, model, qkv, nan=range(37 - window)), _attend(peer(name), model, qkv))


@each_instruction_set
def test_values_of_a_page_s_former_sequence_are_not_read(name: str) -> None:
    qkv = _random_qkv(37, PLAIN)
    assert torch.equal(_attend(name, PLAIN, qkv, nan=range(37, POSITIONS)), _attend(peer(name), PLAIN, qkv))


@each_instruction_set
def test_a_token_that_is_not_finite_changes_no_bit_of_earlier_ones(name: str) -> None:
    model = llama_of(128, 8, 1, 32, 192, 256, 0.2)
    qkv, slots, positions = _random_qkv(36, model), torch.zeros(36, dtype=torch.int64), torch.arange(36)
    expected = runner(peer(name), small_llama(model)).forward.attention(qkv, slots, positions)
    for token in (33, 35):  # in AMX's first and second tile of the last four tokens
        spoiled = qkv.clone()
        spoiled[token, -2:] = torch.inf
        result = runner(name, small_llama(model)).forward.attention(spoiled, slots, positions)
        assert torch.equal(result[:token], expected[:token])
        assert not result[token:].isfinite().any()


@pytest.mark.parametrize("name", RUNNABLE)
def test_torch_may_use_amx_between_two_passes(name: str) -> None:
    qkv = _random_qkv(37, PLAIN)
    with threads(1):
        expected = _attend(name, PLAIN, qkv)
        torch.randn(48, 48).bfloat16() @ torch.randn(48, 48).bfloat16()
        assert torch.equal(_attend(name, PLAIN, qkv), expected)


WITHOUT_ROPE = llama_of(128, 4, 2, 32, 192, 256, 0.25, ropes=(None, None), attention_softcap=0.7)


@each_instruction_set
def test_queries_halfway_between_two_bfloat16_become_the_even_one(name: str) -> None:
    qkv = _random_qkv(37, WITHOUT_ROPE)
    queries = (qkv[:, :4].contiguous().view(torch.int32) & ~0xFFFF) | 0x8000
    upper = torch.where(queries >> 16 & 1 == 1, queries + 0x8000, queries & ~0xFFFF)
    qkv[:, :4] = queries.view(torch.float32)
    rounded = qkv.clone()
    rounded[:, :4] = upper.view(torch.float32)
    assert torch.equal(_attend(name, WITHOUT_ROPE, qkv), _attend(peer(name), WITHOUT_ROPE, rounded))


@each_instruction_set
def test_a_query_that_is_not_finite_has_no_finite_attention(name: str) -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        qkv = _random_qkv(37, WITHOUT_ROPE)
        qkv[-1, :4, 5] = value
        assert not _attend(name, WITHOUT_ROPE, qkv).isfinite().any()
