"""What one Triton can hold and what it holds, from its metrics page."""

from __future__ import annotations

import re
from http.client import HTTPException
from typing import NamedTuple

from triton_llama_openai.metrics import EngineLoad
from triton_llama_openai.triton.engine_load import engine_load, read_page

_TIMEOUT_S = 2.0


class CapacityError(Exception):
    """The metrics page doesn't answer, or has no pages of such a model."""


class Capacity(NamedTuple):
    """slots: sequences that can be decoded together. load: with the pages of the KV cache."""

    slots: int
    load: EngineLoad


def read_capacity(address: str, model: str) -> Capacity:
    """Return the capacity of all instances of a model. address: HOST:PORT of Triton's metrics.

    Raises:
        CapacityError: the page doesn't answer, or has no pages of such a model, as in its first moments.
    """
    try:
        page = read_page(f"http://{address}/metrics", _TIMEOUT_S)
        slots = re.findall(rf'^llama_slots\{{.*model="{re.escape(model)}".*\}} (\S+)', page, re.MULTILINE)
        capacity = Capacity(int(sum(map(float, slots))), engine_load(page, model))
    except (OSError, HTTPException, LookupError, ValueError) as error:
        raise CapacityError(f"the metrics at {address} can't be read: {error}") from error
    if not capacity.load.pages:
        raise CapacityError(f"the metrics at {address} have no pages of the model {model} yet")
    return capacity
