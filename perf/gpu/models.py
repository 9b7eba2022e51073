"""A Llama of random weights, created on the device: no file, no download, no memory outside the memory plan.

The cost of a pass depends on shapes, not on values. Every model has the same weights before they are quantized, and one
at a time is on the device. Each token's text is its number; there is no end token.

With random weights hardly any activation reaches a threshold of 6: LLM.int8() searches for outliers and finds none,
which is its fastest case.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from llama_engine.kernels.gpu.gpu_kernels import STOCK
from llama_engine.libraries import Int8Params, Linear8bitLt, int8_vectorwise_quant
from llama_engine.model.builder import llama_around
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_info import read_model_info
from llama_engine.model.rope import rope_tables
from llama_engine.model.transformers_reader import install_kernels
from llama_engine.text.tokenizer import Tokenizer, Vocabulary
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from perf.checkpoint import EMBEDDED, Shape, config_of
from perf.roofline.rates import Weights


@dataclass(frozen=True)
class Precision:
    """key: in results. weights: of the layers' matrices. threshold: bitsandbytes' for outliers; None: unquantized."""

    key: str
    title: str
    weights: Weights
    threshold: float | None

    def to_json(self) -> dict[str, object]:
        """Return its description in a measurement."""
        return {"title": self.title, "weights": self.weights.upper(), "threshold": self.threshold}


FP16 = Precision("fp16", "FP16", "fp16", None)
FP32 = Precision("fp32", "FP32", "fp32", None)
INT8 = Precision("int8", "INT8, threshold 0", "int8", 0.0)
INT8_OUTLIERS = Precision("int8_outliers", "INT8, threshold 6", "int8", 6.0)


def precisions(device: torch.device) -> Sequence[Precision]:
    """Return the compared precisions, the unquantized one first. A CPU computes FP32 faster than FP16."""
    return (FP32 if device.type == "cpu" else FP16, INT8, INT8_OUTLIERS)


class RandomLlama:
    """The models of a shape on a device, one at a time. Not thread-safe."""

    def __init__(self, shape: Shape, device: torch.device, kernels: str = "fused") -> None:
        """Create nothing yet. kernels: the setting, unless stock layers are requested."""
        self._shape = shape
        self._device = device
        self._kernels = kernels
        self._present: tuple[Precision, bool] | None = None
        self._checkpoint: Checkpoint | None = None
        self._module: LlamaForCausalLM | None = None

    @property
    def module(self) -> LlamaForCausalLM:
        """The present model as transformers computes it."""
        assert self._module is not None, "no model is present"
        return self._module

    def at(self, precision: Precision, stock: bool = False) -> Checkpoint:
        """Return the model in that precision, as the engine serves it; the one returned before must not be used.

        stock: with transformers' and bitsandbytes' own layers.
        """
        # An unreferenced KV cache may still wait for the collector, and its memory be missing in the next plan.
        gc.collect()
        if self._checkpoint is None or self._present != (precision, stock):
            # Freed first: two would not fit.
            self.free()
            kernels = None if stock else self._kernels
            self._module, self._checkpoint = _checkpoint(self._shape, self._device, precision, kernels)
            self._present = precision, stock
        return self._checkpoint

    def free(self) -> None:
        """Free its memory."""
        self._checkpoint = self._module = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def in_8_bits(weight: torch.Tensor, threshold: float = 0.0) -> Linear8bitLt:
    """Return bitsandbytes' layer over a matrix [out, in], quantized on the device that it lies on.

    As its loading does; but that quantizes what comes from the host only.
    """
    outputs, inputs = weight.shape
    made = Linear8bitLt(
        inputs, outputs, bias=False, has_fp16_weights=False, threshold=threshold, device=torch.device("meta")
    )
    codes, scales, _ = int8_vectorwise_quant(weight.half())
    made.weight = Int8Params(codes, requires_grad=False, has_fp16_weights=False, SCB=scales)
    made.weight.CB = made.weight.data
    return made.requires_grad_(False).train(False)


def _checkpoint(
    shape: Shape, device: torch.device, precision: Precision, kernels: str | None
) -> tuple[LlamaForCausalLM, Checkpoint]:
    """Create a model; kernels: the setting, or None for stock layers."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    # In the dtype from the start: twice the memory, cast afterwards, is what a small GPU lacks.
    torch.set_default_dtype(torch.float32 if device.type == "cpu" else torch.float16)
    try:
        with device:
            model = LlamaForCausalLM(config_of(shape))
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False).train(False)
    if precision.threshold is not None:
        # Parents, not linear layers: a list of those would keep every one of them until the last is quantized.
        for parent in [module for module in model.model.modules() if not isinstance(module, torch.nn.Linear)]:
            for name, layer in [*parent.named_children()]:
                if isinstance(layer, torch.nn.Linear):
                    setattr(parent, name, in_8_bits(layer.weight.data, precision.threshold))
    model.generation_config = GenerationConfig(bos_token_id=1, pad_token_id=0)
    installed = STOCK if kernels is None else install_kernels(model, kernels)
    pieces = [f"{token} ".encode() for token in range(shape.vocabulary)]
    return model, Checkpoint(
        name=f"random weights, {shape.hidden} x {shape.layers}",
        config=model.config,
        model=llama_around(model, rope_tables(model.config, shape.positions)),
        tokenizer=Tokenizer(AutoTokenizer.from_pretrained(EMBEDDED), Vocabulary(pieces)),
        generation_config=model.generation_config,
        max_model_len=shape.positions,
        info=read_model_info(model),
        prepared=None,
        kernels=installed,
    )
