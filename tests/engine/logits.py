"""The logits of a sequence by a model runner, without an engine, and transformers' model to compare them with."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from llama_engine.model.loader import LoadedModel
from llama_engine.model.model_runner import ModelRunner, TokenChunk
from transformers import AutoModelForCausalLM, PreTrainedModel


def logits_of(
    checkpoint: LoadedModel,
    tokens: Sequence[int],
    *ends: int,
    runner: ModelRunner | None = None,
    kv_cache_dtype: str = "auto",
) -> torch.Tensor:
    """Return the logits of all tokens, [tokens, vocabulary], in slot 1 of two.

    ends: a prefill pass ends before each, and the remaining tokens are decode steps; without any, all are one pass.
    """
    shape = checkpoint.cache_shape(2, kv_cache_dtype)
    runner = runner or checkpoint.runner(shape)
    runner.cache.set_pages(1, 0, range(1, shape.columns))
    ends = ends or (len(tokens),)
    with torch.inference_mode():
        hidden = [
            runner.run_chunks([TokenChunk(1, start, tokens[start:end])], every=True)
            for start, end in zip((0, *ends[:-1]), ends, strict=True)
        ]
        for position in range(ends[-1], len(tokens)):
            token = torch.tensor([tokens[position]])
            hidden.append(runner.decode(torch.tensor([1]), token, torch.tensor([position]), position + 1))
        return runner.logits(torch.cat(hidden))


def oracle(checkpoint: LoadedModel) -> PreTrainedModel:
    """Return transformers' model, in the dtype and on the device of the checkpoint."""
    return _load(checkpoint.name, checkpoint.info.dtype, checkpoint.info.device)


@lru_cache(1)
def _load(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map={"": device})
    assert isinstance(model, PreTrainedModel)
    return model.requires_grad_(False)
