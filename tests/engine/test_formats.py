"""Checkpoints of other quantizers' formats are read exactly, or requantized to INT8 rows."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from engine.engines import EMBEDDED
from engine.quantized_layers import (
    FP8,
    INPUTS,
    NAME,
    OUTPUTS,
    WEIGHT,
    Config,
    awq_config,
    by_act_order,
    compressed,
    gptq_config,
    in_groups,
    read,
    rounded,
    saved_in,
)
from llama_engine.checkpoint.formats.detection import linear_format
from llama_engine.checkpoint.per_channel import quantize_per_channel, requantized
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight, concatenated
from transformers import LlamaForCausalLM

from models.quantized_checkpoints import (
    Quantized,
    Tensors,
    awq,
    float_blocks,
    gptq,
    int_quantized,
    pack_quantized,
    quantize,
    write,
)

Save = Callable[[Quantized], Tensors]


def assert_per_channel(weight: LinearWeight, floats: torch.Tensor) -> None:
    """Check that a layer was requantized to INT8 per channel."""
    integers, scales = quantize_per_channel(floats)
    assert weight.scales is not None
    assert torch.equal(weight.weight, integers)
    assert torch.equal(weight.scales, scales)


SERVED = [
    *[(rounded(bits, size, sym), partial(gptq, version=version),
       gptq_config(bits, size, checkpoint_format=("gptq", "gptq_v2")[version - 1]))
      for bits, size, sym, version in ((4, 32, True, 1), (4, -1, False, 2), (8, -1, True, 1), (8, 128, False, 1))],
    *[(rounded(bits, by_act_order(64), sym), gptq, gptq_config(bits, 64, desc_act=True))
      for bits, sym in ((4, False), (8, True))],
    *[(rounded(4, size, sym), awq, awq_config(size)) for size, sym in ((32, True), (128, False), (-1, True))],
    *[(rounded(bits, size, sym, torch.bfloat16), partial(pack_quantized, sym=sym), in_groups(bits, size))
      for bits, size, sym in ((4, 32, True), (4, 128, False), (8, -1, True), (8, 32, False))],
    (rounded(4, by_act_order(64)), partial(pack_quantized, ordered=True), in_groups(4, 64)),
    *[(rounded(8, size, sym, dtype), partial(int_quantized, sym=sym),
       compressed({"group_size": size} if size > 0 else {}, format="int-quantized"))
      for size, sym, dtype in ((-1, True, torch.float32), (-1, False, torch.bfloat16), (128, True, torch.float16))],
]  # fmt: skip
"""Layers, how they are saved, and their config."""


@pytest.mark.parametrize("case", SERVED, ids=lambda case: f"{case[2]['quant_method']}-{case[0].bits}")
def test_integers_are_read_as_saved(tmp_path: Path, case: tuple[Quantized, Save, Config]) -> None:
    layer, save, config = case
    weight, expected = read(tmp_path, save(layer), config), layer.dequantized()
    if weight.offsets is None:
        assert torch.equal(weight.dequantized(), expected)
    else:
        # An offset is a second term, each rounded once.
        torch.testing.assert_close(weight.dequantized(), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert weight.scales is not None
    in_rows = layer.bits == 8 and layer.scales.shape[1] == 1 and weight.offsets is None
    assert weight.bits == layer.bits
    assert weight.group_size == (None if in_rows else INPUTS // layer.scales.shape[1])
    # The scales are the saved ones, widened, and the integers too.
    assert torch.equal(weight.scales, layer.scales.float()[:, 0] if in_rows else layer.scales.float())
    centre = 1 << (layer.bits - 1)
    columns = slice(None) if weight.order is None else weight.order
    assert torch.equal(weight.weight.int(), layer.integers[:, columns] - centre)


def test_the_older_gptq_layout_borrows_for_zero_points_of_0(tmp_path: Path) -> None:
    layer = rounded(4, 128, sym=False)
    layer.zeros.zero_()
    weight = read(tmp_path, gptq(layer), gptq_config())
    torch.testing.assert_close(weight.dequantized(), layer.dequantized(), rtol=0, atol=1e-6)


def test_a_scale_of_the_tensor_is_repeated_for_each_row(tmp_path: Path) -> None:
    layer = quantize(WEIGHT.view(1, -1), 8, OUTPUTS * INPUTS)
    tensors = {key: tensor.view(-1) for key, tensor in int_quantized(layer).items()}
    weight = read(tmp_path, {**tensors, "weight": tensors["weight"].view(OUTPUTS, INPUTS)}, compressed())
    assert torch.equal(weight.dequantized(), layer.dequantized().view(OUTPUTS, INPUTS))
    assert weight.scales is not None
    assert weight.scales.shape == (OUTPUTS,)


@pytest.mark.parametrize(
    ("layer", "tensors", "config"),
    [
        # GPTQ's overrides of modules: the tensors say as much.
        (rounded(8, 32), gptq(rounded(8, 32)),
         gptq_config(dynamic={"+:.*down.*": {"bits": 8, "group_size": 32}})),
        # Symmetric AWQ may lack zero points.
        (rounded(4, 128),
         {key: tensor for key, tensor in awq(rounded(4, 128)).items() if key != "qzeros"},
         awq_config(zero_point=False)),
    ],
)  # fmt: skip
def test_what_a_config_lacks_is_read_from_the_tensors(
    tmp_path: Path, layer: Quantized, tensors: Tensors, config: Config
) -> None:
    assert torch.equal(read(tmp_path, tensors, config).dequantized(), layer.dequantized())


def test_large_groups_are_served_as_several(tmp_path: Path) -> None:
    wide = WEIGHT.view(OUTPUTS // 4, -1)
    layer = quantize(wide, 4, 4 * INPUTS)
    weight = read(tmp_path, pack_quantized(layer), in_groups(4, -1), (OUTPUTS // 4, 4 * INPUTS))
    assert weight.group_size == 512
    assert torch.equal(weight.dequantized(), layer.dequantized())


UNEVEN = torch.arange(INPUTS).clamp(max=INPUTS - 2) // 128
"""Groups of 128, 128 and 128 columns, less one that the second has from the third."""
UNEVEN[300] = 1


@pytest.mark.parametrize(
    ("layer", "save", "config"),
    [
        (rounded(4, 48), gptq, gptq_config(size=48)),
        (rounded(8, 16, sym=False), gptq, gptq_config(8, 16)),
        (rounded(4, UNEVEN), gptq, gptq_config()),
        (rounded(4, 48), awq, awq_config(48)),
        (rounded(4, 48), pack_quantized, in_groups(4, 48)),
    ],
)  # fmt: skip
def test_groups_that_kernels_cannot_serve_are_requantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layer: Quantized, save: Save, config: Config
) -> None:
    saved, linear = saved_in(tmp_path, save(layer)), SavedLinear(NAME, (OUTPUTS, INPUTS))
    quantized = linear_format(saved, config)
    assert quantized is not None
    for _ in range(2):
        weight = quantized.read(linear)
    assert_per_channel(weight, layer.dequantized())
    assert [message.split(" and others ")[0] for message in caplog.messages] == [NAME]


FLOAT_QUANTIZED = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("block", "scale_name", "config"),
    [
        ((128, 128), "weight_scale_inv", FP8),
        ((OUTPUTS, INPUTS), "weight_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
        ((OUTPUTS, INPUTS), "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": None}),
        ((1, INPUTS), "weight_scale", {"quant_method": "fbgemm_fp8"}),
        ((1, INPUTS), "weight_scale", compressed(FLOAT_QUANTIZED, format="float-quantized")),
        ((48, 80), "weight_scale", compressed({**FLOAT_QUANTIZED, "block_structure": [48, 80]})),
    ],
)  # fmt: skip
def test_fp8_is_requantized_to_int8_rows(
    tmp_path: Path, block: tuple[int, int], scale_name: str, config: Config
) -> None:
    tensors = float_blocks(WEIGHT, *block, scale_name)
    scales = tensors[scale_name].view(-(-OUTPUTS // block[0]), -1)
    repeated = scales.repeat_interleave(block[0], 0)[:OUTPUTS].repeat_interleave(block[1], 1)[:, :INPUTS]
    assert_per_channel(read(tmp_path, tensors, config), tensors["weight"].float() * repeated)


@pytest.mark.parametrize(
    ("tensors", "config", "line"),
    [
        ({"input_scale": torch.ones(1)}, {}, f"1 saved scales of activations are ignored, first {NAME}.input_scale"),
        ({}, {"kv_cache_scheme": {"num_bits": 8}},
         "kv_cache_scheme is ignored: the setting kv_cache_dtype selects the KV cache's dtype"),
    ],
)  # fmt: skip
def test_what_is_ignored_gets_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tensors: Tensors, config: Config, line: str
) -> None:
    read(tmp_path, {**int_quantized(rounded(8)), **tensors}, compressed(**config))
    assert caplog.messages == [line]


@pytest.mark.parametrize("sign", [0, -1])
def test_scales_may_be_negative_and_0_for_weights_of_0(tmp_path: Path, sign: int) -> None:
    layer = rounded(4, 128, sym=False)
    if sign == 0:
        layer.integers[:, :128] = layer.zeros[:, :1]
    layer.scales[:, 0] *= sign
    weight = read(tmp_path, gptq(layer), gptq_config())
    torch.testing.assert_close(weight.dequantized(), layer.dequantized(), rtol=0, atol=1e-6)


def test_fused_layers_that_differ_are_concatenated_exactly(tmp_path: Path) -> None:
    layers: list[tuple[Quantized, Save, Config]] = [
        (rounded(8), int_quantized, compressed()),
        (rounded(4, 128), gptq, gptq_config()),
        (rounded(8, 32, sym=False), gptq, gptq_config(8, 32)),
    ]
    parts = []
    for index, (layer, save, config) in enumerate(layers):
        folder = tmp_path / str(index)
        folder.mkdir()
        parts.append(read(folder, save(layer), config))
    fused = concatenated(parts)
    assert (fused.bits, fused.group_size) == (8, 32)
    assert torch.equal(fused.dequantized(), torch.cat([part.dequantized() for part in parts]))
    four_bits = concatenated([parts[1], parts[1].in_groups(64)])
    assert (four_bits.bits, four_bits.group_size) == (4, 64)
    assert torch.equal(four_bits.dequantized(), torch.cat([parts[1].dequantized()] * 2))


def test_layers_with_different_orders_are_requantized_before_fusing(tmp_path: Path) -> None:
    weight = read(tmp_path, gptq(rounded(4, by_act_order(64))), gptq_config(size=64))
    assert weight.order is not None
    with pytest.raises(ValueError, match="different orders"):
        concatenated([weight, read(tmp_path, gptq(rounded(4, 64)), gptq_config(size=64))])
    assert_per_channel(requantized(weight), weight.dequantized())


def test_fp8_is_widened_as_by_transformers(tmp_path: Path) -> None:
    folder = write(EMBEDDED, "fp8", tmp_path / "saved")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    name = "model.layers.1.mlp.down_proj"
    widened = model.get_parameter(f"{name}.weight").detach()
    quantized = linear_format(SavedTensors(folder), FP8)
    assert quantized is not None
    read_layer = quantized.read(SavedLinear(name, (widened.shape[0], widened.shape[1])))
    assert torch.equal(read_layer.weight, quantize_per_channel(widened.float())[0])
