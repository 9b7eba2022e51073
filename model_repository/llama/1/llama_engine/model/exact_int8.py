"""Linear layers with INT8 weights on a CPU, whose sums are exact: a row's result is the same bits in every batch.

The activations are quantized to 15 bits (two terms) or 8 (one), a scale a row, and the products are integers: see
`integer_product` for the form and `int8_selection` for how it is selected. Rows are independent: each one's result is
the same alone, in any batch and with any number of threads, and values that aren't finite stay in their row.

Source of one term: LLM.int8() without outliers, https://arxiv.org/abs/2208.07339.
"""

from __future__ import annotations

import torch

from llama_engine.model.int8_selection import select_form
from llama_engine.model.integer_product import Form, IntegerProduct
from llama_engine.model.weights import LinearWeight
from llama_engine.model.widened_product import BlockwiseProduct

FEW_ROWS = 64
"""Rows up to which widened weights are the left operand of the product."""


class ExactInt8Linear:
    """y = x Wᵀ + b in exact integer sums. Thread-safe.

    Keeps a packed copy of the weight, one byte each, and no reference to the original: making a layer takes the
    weight's size once more until its owner drops it.
    """

    def __init__(self, weight: LinearWeight, form: Form, terms: int) -> None:
        self.out_features, self.in_features = weight.weight.shape
        self.form, self._terms = form, terms
        self._product = IntegerProduct(weight.weight, _weight_scales(weight), form)
        self._bias = None if weight.bias is None else weight.bias.float()

    def __call__(self, activations: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in], in the dtype of the activations."""
        rows = activations.reshape(-1, self.in_features).float()
        terms, scales = self.form.split(rows, self._terms)
        sums = self._product(terms).narrow(1, 0, len(rows)).unbind()
        # 2ᵇ · high is exact, so that this rounds once, with and without a fused multiply-add.
        result = sums[0] if self._terms == 1 else torch.add(sums[1], sums[0], alpha=1 << self.form.bits)
        result.mul_(scales)
        if self._bias is not None:
            result.add_(self._bias)
        return result.to(activations.dtype).view(*activations.shape[:-1], self.out_features)

    def describe(self) -> str:
        """Name the product, for the log."""
        return f"exact INT8, {('one term', 'two terms')[self._terms - 1]}, oneDNN with {self.form}"


class WidenedInt8Linear:
    """y = x Wᵀ + b with the weights widened to float32; its bits depend on the batch. Not thread-safe.

    Keeps the weight itself. product: may be shared by layers that run one after the other.
    """

    def __init__(self, weight: LinearWeight, product: BlockwiseProduct) -> None:
        self.out_features, self.in_features = weight.weight.shape
        self._weight, self._scales, self._bias = weight.weight, _weight_scales(weight), weight.bias
        self._product = product

    def __call__(self, activations: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in], in the dtype of the activations."""
        rows = activations.reshape(-1, self.in_features)
        product = self._product.few_rows if len(rows) <= FEW_ROWS else self._product.many_rows
        result = product(rows, self._weight, self._scales, self._bias)
        return result.view(*activations.shape[:-1], self.out_features)

    def describe(self) -> str:
        """Name the product, for the log."""
        return "INT8 weights widened to float32"


Int8Layer = ExactInt8Linear | WidenedInt8Linear


class Int8Packer:
    """Makes the linear layers of one model from INT8 weights. terms: 1 or 2, of the activations."""

    def __init__(self, terms: int) -> None:
        if terms not in (1, 2):
            raise ValueError(f"terms is {terms}, not 1 or 2")
        self._terms = terms
        self._widened = BlockwiseProduct()
        self._descriptions: dict[str, None] = {}
        self.exact = True
        """Whether all layers made so far are exact."""

    def __call__(self, weight: LinearWeight) -> Int8Layer:
        """Return the layer of a weight. The caller drops its references to the weight afterwards."""
        form = select_form(*weight.weight.shape, self._terms)
        layer = WidenedInt8Linear(weight, self._widened) if form is None else ExactInt8Linear(weight, form, self._terms)
        self._descriptions[layer.describe()] = None
        self.exact &= form is not None
        return layer

    def describe(self) -> str:
        """Name the products of all layers made so far, for the log and the status."""
        return "; ".join(self._descriptions)


def _weight_scales(weight: LinearWeight) -> torch.Tensor:
    assert weight.scales is not None, "the weight is not quantized"
    return weight.scales.float() / 127.0
