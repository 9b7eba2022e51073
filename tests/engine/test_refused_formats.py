"""Variants and contents of other quantizers' formats that are refused by name."""

from pathlib import Path

import pytest
import torch
from engine.engines import EMBEDDED, load
from engine.quantized_layers import (
    FP8,
    INPUTS,
    NAME,
    OUTPUTS,
    WEIGHT,
    Config,
    awq_config,
    compressed,
    gptq_config,
    in_groups,
    read,
    rounded,
    saved_in,
)
from llama_engine.checkpoint.formats.detection import linear_format
from llama_engine.errors import CheckpointError

from models.quantized_checkpoints import Tensors, float_blocks, gptq, pack_quantized, write


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "is quantized with 'aqlm'; this engine reads bitsandbytes, compressed-tensors"),
        (gptq_config(3), "bits is 3; this engine reads GPTQ's 4 and 8"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; this engine reads gptq, gptq_v2"),
        (gptq_config(size=0), "group_size is 0, not a number of columns or -1"),
        (awq_config(bits=8), "bits is 8; this engine reads AWQ's 4"),
        (awq_config(version="gemv_fast"), "version is 'gemv_fast'; this engine reads AWQ's gemm"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\], not the rows and columns"),
        (compressed(format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'; this engine reads int-quant"),
        (compressed({"num_bits": 3}), "weights is 'int3'; this engine reads int4, int8, float8"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format is 'sparse-24-bitmask'"),
        (compressed(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
         r"transform_config is \['hadamard'\]; this engine applies no transforms"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"input_activations": {"symmetric": False}}}},
         "input_activations.symmetric is False"),
    ],
)  # fmt: skip
def test_variants_that_are_not_served_are_refused_by_name(tmp_path: Path, config: Config, message: str) -> None:
    saved = saved_in(tmp_path, {"weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=message) as refused:
        linear_format(saved, config)
    assert str(refused.value).startswith(str(tmp_path))


def _changed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy whose first element is another one."""
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


GROUPED = rounded(4, 128)
NOT_FINITE = "has a scale in {}.{} that is NaN or larger than 1e\\+35"


@pytest.mark.parametrize(
    ("tensors", "config", "changed", "message"),
    [
        *[(gptq(GROUPED), gptq_config(), {"scales": _changed(GROUPED.scales.t().float().contiguous(), value)},
           NOT_FINITE.format(NAME, "scales")) for value in (torch.nan, 1e38)],
        (gptq(GROUPED), gptq_config(), {"scales": _changed(GROUPED.scales.t().contiguous(), 0)},
         f"has a scale of 0 for weights of {NAME} that aren't 0"),
        (gptq(GROUPED), gptq_config(), {"g_idx": _changed(GROUPED.groups.int(), 3)},
         f"has group 3 in {NAME}.g_idx, not 0 to 2"),
        (pack_quantized(GROUPED), in_groups(4, 128), {"weight_shape": torch.tensor([OUTPUTS, 9])},
         rf"has \({OUTPUTS}, 9\) in {NAME}.weight_shape, not \({OUTPUTS}, {INPUTS}\)"),
        (pack_quantized(GROUPED), in_groups(4, 128), {"weight_packed": torch.zeros(OUTPUTS, 36, dtype=torch.int32)},
         rf"has {NAME}.weight_packed in shape \({OUTPUTS}, 36\), which isn't that of"),
        (pack_quantized(GROUPED), in_groups(4, 128), {"weight_scale": torch.ones(OUTPUTS, 6)},
         rf"has {NAME}.weight_scale in shape \({OUTPUTS}, 6\), not per tensor, channel or group"),
        (pack_quantized(GROUPED), in_groups(4, 128),
         {"weight_zero_point": torch.full((OUTPUTS, 3), 8, dtype=torch.int8)},
         f"has zero point 8 in {NAME}.weight_zero_point, not -8 to 7"),
        (float_blocks(WEIGHT, 128, 128, "weight_scale_inv"), FP8,
         {"weight": torch.full((OUTPUTS, INPUTS), torch.nan).to(torch.float8_e4m3fn)},
         f"has a weight in {NAME}.weight that is NaN"),
        (float_blocks(WEIGHT, 128, 128, "weight_scale_inv"), FP8, {"weight_scale_inv": torch.ones(2, 3)},
         rf"has {NAME}.weight_scale_inv in shape \(2, 3\), not per tensor, channel or block"),
    ],
)  # fmt: skip
def test_invalid_contents_are_refused_by_name(
    tmp_path: Path, tensors: Tensors, config: Config, changed: Tensors, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        read(tmp_path, {**tensors, **changed}, config)
    assert str(refused.value).startswith(str(tmp_path))


@pytest.fixture(scope="module")
def gptq8(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(EMBEDDED, "gptq8", tmp_path_factory.mktemp("gptq8") / "saved"))


def test_another_quantization_than_the_saved_one_is_refused(gptq8: str) -> None:
    with pytest.raises(CheckpointError, match=r"^quantization is 'none', but .* is saved in gptq; set"):
        load("none", model=gptq8)


def test_an_outlier_threshold_for_a_format_without_one_is_refused(gptq8: str) -> None:
    with pytest.raises(CheckpointError, match=r"^int8_threshold is 6, but .* is saved in gptq, which has no outlier"):
        load("int8", model=gptq8, int8_threshold="6")
