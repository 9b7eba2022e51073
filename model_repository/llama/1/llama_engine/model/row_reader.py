"""A reader that converts linear weights, for layers that take other ones than those that are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from llama_engine.model.builder import Reader
from llama_engine.model.weights import LayerWeights, LinearWeight


class ConvertingReader:
    """Reads what another reader does, and converts each linear weight."""

    def __init__(self, reader: Reader, convert: Callable[[LinearWeight], LinearWeight]) -> None:
        self._reader, self._convert = reader, convert

    def embedding(self) -> torch.Tensor:
        """Return [vocabulary, hidden]."""
        return self._reader.embedding()

    def norm(self) -> torch.Tensor:
        """Return the gain of the final norm, [hidden]."""
        return self._reader.norm()

    def head(self) -> LinearWeight:
        """Return the output projection."""
        return self._convert(self._reader.head())

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of one layer."""
        layer = self._reader.layer(index)
        return replace(
            layer,
            query_key_value=self._convert(layer.query_key_value),
            attention_output=self._convert(layer.attention_output),
            gate_up=self._convert(layer.gate_up),
            down=self._convert(layer.down),
        )
