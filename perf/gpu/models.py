"""A Llama of random weights, created on the device: no file, no download, no memory outside the memory plan.

The cost of a pass depends on shapes, not on values. One model serves all precisions in turn (unquantized, quantized in
place by bitsandbytes, then other thresholds), so the device never holds two. Each token's text is its number; there is
no end token.

With random weights hardly any activation reaches a threshold of 6: LLM.int8() searches for outliers and finds none,
which is its fastest case.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from llama_engine.kernels.selection import STOCK
from llama_engine.libraries import Int8Params, Linear8bitLt, int8_vectorwise_quant
from llama_engine.model.loader import Checkpoint, install_kernels
from llama_engine.model.model_info import read_model_info
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


def precisions(device: str) -> Sequence[Precision]:
    """Return the unquantized precision first: quantizing can't be undone. A CPU computes FP32 faster than FP16."""
    return (FP32 if device == "cpu" else FP16, INT8, INT8_OUTLIERS)


class RandomLlama:
    """One model of a shape on a device. Not thread-safe."""

    def __init__(self, shape: Shape, device: torch.device, kernels: str = "fused") -> None:
        """Create nothing yet. kernels: the setting, unless stock layers are requested."""
        self._shape = shape
        self._device = device
        self._kernels = kernels
        self._checkpoint: Checkpoint | None = None
        # The present precision, and whether the layers are bitsandbytes'.
        self._state: tuple[Precision, bool] | None = None

    def at(self, precision: Precision, stock: bool = False) -> Checkpoint:
        """Return the model in that precision, as the engine serves it; invalidates what was returned before.

        stock: with bitsandbytes' own layers. A state that the present model can't reach (unquantized after quantized,
        bitsandbytes' layers after the engine's) takes a new model.
        """
        # An unreferenced KV cache may still wait for the collector, and its memory be missing in the next plan.
        gc.collect()
        made = self._checkpoint
        if made is not None and self._state == (precision, stock):
            return made
        if made is None or _is_spent(made, precision, stock):
            # Freed first: both would not fit.
            made = None
            self.free()
            made = _made(self._shape, self._device)
        if precision.threshold is not None:
            if made.info.threshold is None:
                quantize(made.model)
            set_threshold(made.model, precision.threshold)
        if stock:
            # An engine may have put its own in there.
            made.model.set_attn_implementation("sdpa")
            self._checkpoint = replace(made, info=read_model_info(made.model), kernels=STOCK)
        else:
            _restore_scales(made.model)
            kernels = install_kernels(made.model, self._kernels)
            self._checkpoint = replace(made, info=read_model_info(made.model), kernels=kernels)
        self._state = precision, stock
        return self._checkpoint

    def free(self) -> None:
        """Free its memory."""
        self._checkpoint = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def quantize(model: LlamaForCausalLM) -> None:
    """Put bitsandbytes' 8-bit layers in the place of the decoder's linear layers, one after the other.

    As its loading does; but that quantizes what comes from the host only. The head stays as it is.
    """
    # Not of the linear layers themselves, which would keep every one of them until the last is quantized.
    parents = [module for module in model.model.modules() if not isinstance(module, torch.nn.Linear)]
    for parent in parents:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, torch.nn.Linear):
                setattr(parent, name, in_8_bits(layer.weight.data))


def in_8_bits(weight: torch.Tensor, threshold: float = 0.0) -> Linear8bitLt:
    """Return bitsandbytes' layer over a matrix [out, in], quantized on the device that it lies on."""
    outputs, inputs = weight.shape
    made = Linear8bitLt(
        inputs, outputs, bias=False, has_fp16_weights=False, threshold=threshold, device=torch.device("meta")
    )
    codes, scales, _ = int8_vectorwise_quant(weight.half())
    made.weight = Int8Params(codes, requires_grad=False, has_fp16_weights=False, SCB=scales)
    made.weight.CB = made.weight.data
    return made.requires_grad_(False).train(False)


def set_threshold(model: LlamaForCausalLM, threshold: float) -> None:
    """Set the outlier threshold of all 8-bit layers."""
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            module.state.threshold = threshold


def _restore_scales(model: LlamaForCausalLM) -> None:
    """Restore weight and scales where a new layer expects them: bitsandbytes' layer takes them at its first use."""
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            weight = module.weight
            assert isinstance(weight, Int8Params), "a weight that isn't in 8 bits"
            if weight.SCB is None:
                weight.CB, weight.SCB = module.state.CB, module.state.SCB


def has_stock_layers(model: LlamaForCausalLM) -> bool:
    """Return whether every matrix of the decoder is bitsandbytes' own 8-bit layer, or none is in 8 bits."""
    kinds = {type(module) for module in model.model.modules() if isinstance(module, torch.nn.Linear)}
    return kinds in ({torch.nn.Linear}, {Linear8bitLt})


def _is_spent(checkpoint: Checkpoint, precision: Precision, stock: bool) -> bool:
    """Return whether the model can't reach that state: quantizing and the engine's own layers can't be undone."""
    if has_stock_layers(checkpoint.model):
        return precision.threshold is None and checkpoint.info.threshold is not None
    return stock or precision.threshold != checkpoint.info.threshold


def _made(shape: Shape, device: torch.device) -> Checkpoint:
    config = config_of(shape)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    # In the dtype from the start: twice the memory, cast afterwards, is what a small GPU lacks.
    torch.set_default_dtype(torch.float32 if device.type == "cpu" else torch.float16)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False).train(False)
    model.generation_config = GenerationConfig(bos_token_id=1, pad_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    pieces = [f"{token} ".encode() for token in range(shape.vocabulary)]
    return Checkpoint(
        name=f"random weights, {shape.hidden} x {shape.layers}",
        model=model,
        tokenizer=Tokenizer(tokenizer, Vocabulary(pieces)),
        generation_config=model.generation_config,
        max_model_len=shape.positions,
        info=read_model_info(model),
        prepared=None,
    )
