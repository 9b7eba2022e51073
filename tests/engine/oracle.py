"""transformers' own model of a checkpoint, unquantized: what the engine's results are compared with."""

from functools import lru_cache

import torch
from llama_engine.model.loader import LoadedModel
from transformers import AutoModelForCausalLM, PreTrainedModel


def oracle(checkpoint: LoadedModel) -> PreTrainedModel:
    """Return transformers' model, in the dtype and on the device of the checkpoint."""
    return _load(checkpoint.name, checkpoint.info.dtype, checkpoint.info.device)


@lru_cache(1)
def _load(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map={"": device})
    assert isinstance(model, PreTrainedModel)
    return model.requires_grad_(False)
