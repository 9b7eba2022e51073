"""A reader for products that take INT8 rows alone: groups of columns are requantized."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from llama_engine.model.builder import Reader
from llama_engine.model.int8_rows import requantized
from llama_engine.model.weights import LayerWeights, LinearWeight

_log = logging.getLogger(__name__)


class RowReader:
    """Reads what another reader does, with INT8 rows for groups; the first ones are logged."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._logged = reader, False

    def embedding(self) -> torch.Tensor:
        """Return [vocabulary, hidden]."""
        return self._reader.embedding()

    def norm(self) -> torch.Tensor:
        """Return the gain of the final norm, [hidden]."""
        return self._reader.norm()

    def head(self) -> LinearWeight:
        """Return the output projection."""
        return self._rows(self._reader.head())

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of one layer."""
        layer = self._reader.layer(index)
        return replace(
            layer,
            query_key_value=self._rows(layer.query_key_value),
            attention_output=self._rows(layer.attention_output),
            gate_up=self._rows(layer.gate_up),
            down=self._rows(layer.down),
        )

    def _rows(self, weight: LinearWeight) -> LinearWeight:
        if weight.group_size is not None and not self._logged:
            self._logged = True
            _log.warning("linear layers in groups of %d columns are rounded to INT8 rows", weight.group_size)
        return requantized(weight)
