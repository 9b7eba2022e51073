"""The CPU kernels' forward pass is near the reference, and a token's bits don't depend on what runs beside it."""

from dataclasses import replace

import pytest
import torch
from engine.cpu_kernels.models import (
    PLAIN,
    RUNNABLE,
    SmallLlama,
    kernels,
    llama_of,
    peer,
    random_tokens,
    runner,
    small_llama,
)
from engine.int8_layers import AUTO, threads
from llama_engine.checkpoint.architecture import ROPE, Architecture
from llama_engine.kernels.activation_terms import ONE_TERM, TWO_TERMS, ActivationTerms
from llama_engine.kernels.cpu.forward import CpuForward
from llama_engine.kernels.cpu.instruction_sets import INSTRUCTION_SETS
from llama_engine.kernels.cpu.packing import pack_layer

each_instruction_set = pytest.mark.parametrize("name", INSTRUCTION_SETS)

SHAPES = {
    "no GQA": llama_of(128, 4, 4, 32, 192, 256, 0.2),
    "GQA 2": PLAIN,
    "GQA 4": llama_of(128, 8, 2, 16, 192, 256, 0.2),
    "GQA 8": llama_of(128, 8, 1, 64, 192, 256, 0.2),
    "GQA 3": llama_of(192, 6, 2, 48, 200, 300, 0.2),
    "odd sizes": llama_of(100, 3, 3, 20, 77, 101, 0.2),
    "heads wider than hidden": llama_of(96, 4, 2, 128, 160, 257, 0.1, epsilon=1e-6),
}

ALL_OPTIONS = llama_of(
    100, 6, 2, 20, 77, 101, 0.2, windows=(19, None), ropes=(ROPE, None), rotary=12, activation="gelu_tanh",
    query_key_norm="head", norm_after=True, residual_scale=0.5, logits_scale=0.25, attention_softcap=1.5,
    logits_softcap=2.0,
)  # fmt: skip

OPTIONS = {
    "all": ALL_OPTIONS,
    **{f"window {size}": llama_of(128, 8, 2, 32, 192, 256, 0.2, windows=(size, size)) for size in (1, 17)},
    "layer without RoPE": llama_of(128, 4, 2, 32, 192, 256, 0.2, ropes=(ROPE, None)),
    "partial RoPE": llama_of(128, 4, 2, 24, 192, 256, 0.2, rotary=18),
    "GELU": llama_of(128, 4, 2, 32, 192, 256, 0.2, activation="gelu_tanh"),
    "norm of heads": llama_of(128, 4, 2, 24, 192, 256, 0.2, query_key_norm="head"),
    "norm of all heads": llama_of(128, 4, 2, 24, 192, 256, 0.2, query_key_norm="projection"),
    "norms after": llama_of(100, 4, 2, 24, 192, 256, 0.2, norm_before=False, norm_after=True),
    "scales": llama_of(128, 4, 2, 32, 192, 256, 0.2, residual_scale=0.22, logits_scale=0.125),
    "caps": llama_of(128, 4, 2, 32, 192, 256, 0.2, attention_softcap=0.7, logits_softcap=4.0),
}
MODELS = {
    "plain": (PLAIN, False),
    "all options": (ALL_OPTIONS, False),
    "groups": (PLAIN, True),
    # 28 queries of four tokens: two tiles of AMX, the second one in part, and a tail of 16 dimensions.
    "GQA 7": (llama_of(112, 7, 1, 48, 192, 256, 0.2), False),
}
"""Architecture, and whether linear layers are in groups of columns."""

each_precision = pytest.mark.parametrize(
    ("llama", "cache", "terms"),
    [
        ("plain", torch.bfloat16, AUTO),
        ("GQA 7", torch.bfloat16, AUTO),
        ("plain", torch.float32, ONE_TERM),
        ("all options", torch.float32, TWO_TERMS),
        ("all options", torch.bfloat16, AUTO),
        ("all options", torch.int8, AUTO),
        ("groups", torch.int8, TWO_TERMS),
    ],
    indirect=["llama"],
)


@pytest.fixture
def llama(request: pytest.FixtureRequest) -> SmallLlama:
    model, grouped = MODELS[request.param]
    return small_llama(model, grouped=grouped)


DEEP = llama_of(128, 4, 2, 32, 192, 256, 32**-0.5, layers=4)
EVERYWHERE = [OPTIONS[name] for name in ("all", "norm of all heads", "norms after")]
"""Models with every option between them: OLMo's two norms exclude others of ALL_OPTIONS."""
EXACT = (torch.float32, TWO_TERMS, 3e-4)
PRECISIONS = [
    (torch.bfloat16, TWO_TERMS, 5e-3),
    (torch.int8, TWO_TERMS, 2e-2),
    (torch.float32, AUTO, 3e-2),
    (torch.float32, ONE_TERM, 3e-2),
]
"""A cache, the terms, and the largest difference that they allow, relative to the largest logit."""


# Of the other instruction sets, the bits of MODELS are compared with those of AVX2, or of AMX's emulation, below.
@pytest.mark.parametrize(
    ("name", "model", "bias", "grouped", "precision"),
    [
        *[("avx2", model, False, False, EXACT) for model in OPTIONS.values()],
        *[(name, model, True, False, EXACT) for name in INSTRUCTION_SETS for model in (*EVERYWHERE, *SHAPES.values())],
        *[(name, PLAIN, True, True, EXACT) for name in INSTRUCTION_SETS],
        *[(name, DEEP, False, False, precision) for name in INSTRUCTION_SETS for precision in PRECISIONS],
        *[("avx512-amx", model, False, False, PRECISIONS[0]) for model in SHAPES.values()],
    ],
)
def test_logits_are_near_the_reference(
    name: str,
    model: Architecture,
    bias: bool,
    grouped: bool,
    precision: tuple[torch.dtype, ActivationTerms, float],
) -> None:
    (cache, terms, bound), llama = precision, small_llama(model, bias, grouped)
    tokens = random_tokens(60, 0, model.vocabulary)
    result, expected = runner(name, llama, cache, terms).logits(tokens, 3, 0), llama.reference(tokens)
    assert (result - expected).abs().max() <= bound * expected.abs().max()


@each_instruction_set
@each_precision
def test_any_cut_and_number_of_threads_gives_the_same_bits(
    name: str, cache: torch.dtype, terms: ActivationTerms, llama: SmallLlama
) -> None:
    tokens = random_tokens(50, 0, llama.architecture.vocabulary)
    expected = runner(peer(name, cache), llama, cache, terms).logits(tokens, 0, 0)
    # 7 tokens fit into a call of the kernels.
    for room in (64, 7):
        assert torch.equal(runner(name, llama, cache, terms, room).logits(tokens, 0, 0), expected)
    for size in (1, 17, 49):
        run = runner(name, llama, cache, terms)
        cuts = [run.logits(tokens[at : at + size], 2, at) for at in range(0, 50, size)]
        assert torch.equal(torch.cat(cuts), expected)
    with threads(3):
        # More threads than at the start of the runner.
        assert torch.equal(run.logits(tokens, 1, 0), expected)
        assert torch.equal(runner(name, llama, cache, terms).logits(tokens, 1, 0), expected)


@each_instruction_set
@each_precision
def test_a_sequence_in_a_batch_has_the_bits_of_the_sequence_alone(
    name: str, cache: torch.dtype, terms: ActivationTerms, llama: SmallLlama
) -> None:
    lengths = (1, 15, 16, 33, 50)
    sequences = [random_tokens(length + 1, length, llama.architecture.vocabulary) for length in lengths]
    alone = [runner(peer(name, cache), llama, cache, terms).logits(tokens, 0, 0) for tokens in sequences]
    run = runner(name, llama, cache, terms)
    for slot, tokens in enumerate(sequences):
        run.logits(tokens[:-1], slot, 0)
    # One step of all, in another order than their slots.
    order = torch.tensor([3, 0, 4, 1, 2])
    step = run.logits(torch.stack([sequences[i][-1] for i in order]), order, torch.tensor(lengths)[order])
    assert torch.equal(step, torch.stack([alone[i][-1] for i in order]))


# Emulated instructions take long, and the threads' code is that of the others.
@pytest.mark.parametrize("name", RUNNABLE)
def test_threads_that_come_late_change_no_bit(name: str) -> None:
    """More threads than cores, so that some arrive when others are in later layers, whose rows have other terms."""
    llama = small_llama(llama_of(256, 4, 2, 64, 2048, 512, 0.125, layers=6))
    for number, layer in enumerate(llama.layers):
        # Outliers in the inputs of every other layer, so that the number of terms changes from layer to layer.
        for gain in (layer.attention_norm, layer.mlp_norm):
            assert gain is not None
            gain[0] = (50.0, 1.0)[number % 2]
    # Up to 8 terms on AVX512-VNNI and 32 on AMX are one call of the product, in larger chunks of weights.
    for rows, passes in ((6, 60), (24, 15), (60, 5)):
        tokens, slots = random_tokens(rows, 0, 512), torch.zeros(rows, dtype=torch.long)
        run = runner(name, llama)
        x = llama.embedding[tokens]
        with threads(1):
            expected = run.forward.forward(x.clone(), slots, torch.arange(rows))
        with threads(8):
            for _ in range(passes):
                assert torch.equal(run.forward.forward(x.clone(), slots, torch.arange(rows)), expected)


def test_groups_of_heads_that_are_padded_become_rows() -> None:
    llama = small_llama(llama_of(96, 8, 8, 12, 96, 96, 0.2, layers=1), grouped=True)
    assert llama.layers[0].attention_output.group_size == 32
    packed = pack_layer(kernels("avx2"), llama.architecture, llama.layers[0])
    assert packed.attention_output.matrix.groups == 0
    assert packed.gate_up.matrix.groups == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_model_len": 65}, "RoPE's tables have 64 positions, and sequences 65"),
        ({"page_size": 32}, "the cache has pages of 32 positions, and the kernels of 16"),
    ],
)
def test_a_cache_that_kernels_cannot_take_is_refused(changed: dict[str, int], message: str) -> None:
    shape = replace(small_llama().cache_shape(1, torch.float32), **changed)  # type: ignore[arg-type]  # fields
    with pytest.raises(ValueError, match=message):
        CpuForward(small_llama().packed(kernels("avx2")), shape)


@pytest.mark.parametrize(
    ("slot", "position", "message"),
    [
        (5, 0, "slot 5 is outside the KV cache of 5 slots"),
        (0, 64, "position 64 is outside the KV cache of 64 positions"),
        (0, -1, "position -1 is outside"),
        (1, 32, "position 32 of slot 1 has no page"),
    ],
)
def test_a_token_without_a_page_is_refused(slot: int, position: int, message: str) -> None:
    run = runner("avx2")
    run.forward.cache.set_pages(1, 2, [0, 0])
    with pytest.raises(IndexError, match=message):
        run.logits(random_tokens(2, 0), torch.tensor([1, slot]), torch.tensor([31, position]))


@pytest.mark.parametrize(
    ("slot", "first", "pages", "message"),
    [
        (5, 0, [1], "slot 5 is outside"),
        (0, 4, [1, 2], "column 5 is outside the KV cache of 5 columns"),
        (0, -1, [1], "column -1 is outside"),
        (0, 0, [1, 21], "page 21 is outside the KV cache of 21 pages"),
    ],
)
def test_pages_outside_the_table_or_the_pool_are_refused(slot: int, first: int, pages: list[int], message: str) -> None:
    forward = runner("avx2").forward
    with pytest.raises(IndexError, match=message):
        forward.cache.set_pages(slot, first, pages)
    for source, target in ((21, 1), (1, 21), (-1, 1)):
        with pytest.raises(IndexError, match="is outside the KV cache of 21 pages"):
            forward.cache.copy(source, target)
