"""The KV cache: any pages give the same bits, and nothing of a former sequence reaches the next."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import attention_by_sequence, completions, engine_of, load, spoil_cache
from engine.prompts import requests_of
from llama_engine.engine import memory_plan
from llama_engine.model.loader import LoadedModel
from llama_engine.model.model_runner import PromptChunk
from llama_engine.model.torch_runner import TorchRunner


@pytest.mark.parametrize("attending", ["alone", "masked", "by row"])
@pytest.mark.parametrize("max_model_len", [150, 160])
def test_logits_have_the_same_bits_on_any_pages(fp32: LoadedModel, attending: str, max_model_len: int) -> None:
    checkpoint = replace(
        fp32, max_model_len=max_model_len, attention=attention_by_sequence if attending == "by row" else None
    )
    shape = checkpoint.cache_shape(2)
    in_order, reversed_order = list(range(1, shape.pages + 1)), list(range(shape.pages, 0, -1))
    expected, found = (_logits(checkpoint, attending == "masked", pages) for pages in (in_order, reversed_order))
    assert torch.equal(found, expected)


def _logits(checkpoint: LoadedModel, captured: bool, pages: list[int]) -> torch.Tensor:
    """Return logits of a prefill in chunks and of decode steps, over a cache of NaN beside the prompt's pages."""
    runner = checkpoint.runner(checkpoint.cache_shape(2), captured)
    assert isinstance(runner, TorchRunner)
    runner.kv_cache.keys.fill_(torch.nan)
    runner.kv_cache.values.fill_(torch.nan)
    half = len(pages) // 2
    for slot in (0, 1):
        runner.set_pages(slot, 0, pages[slot * half : (slot + 1) * half])
    length = checkpoint.max_model_len
    tokens = [20 + position % 97 for position in range(length)]
    with torch.inference_mode():
        hidden = [
            runner.prefill([PromptChunk(slot, 0, tokens[: 40 + slot]) for slot in (0, 1)], every=True),
            runner.prefill([PromptChunk(slot, 40 + slot, tokens[40 + slot : 140]) for slot in (0, 1)], every=True),
        ]
        for position in range(140, length):
            rows = torch.tensor([0, 1]), torch.tensor([tokens[position]] * 2), torch.tensor([position, position])
            hidden.append(runner.decode(*rows, span=position + 1))
        return runner.logits(torch.cat(hidden))


# "by row" reads a cache in the dtype of the model.
@pytest.mark.parametrize(
    ("attending", "kv_cache_dtype"),
    [*product(("alone", "masked", "compiled"), ("auto", "int8")), ("by row", "auto")],
)
def test_stale_values_change_no_token(
    fp32: LoadedModel, attending: str, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position beyond a row's own isn't read, or masked: a slot may hold NaN."""
    requests = requests_of(fp32, 6, range(1, 90), 10)
    checkpoint, parameters = fp32, {"kv_cache_dtype": kv_cache_dtype}
    if attending == "by row":
        checkpoint = replace(fp32, attention=attention_by_sequence)
    elif attending == "masked":
        # As where a decode step is a CUDA graph.
        monkeypatch.setattr(memory_plan, "unsupported_reason", lambda _: None)
        parameters["cuda_graphs"] = "on"
    elif attending == "compiled":
        needs_compiled_kernels()
        checkpoint = load("int8", kv_cache_dtype=kv_cache_dtype)
    expected, found = engine_of(checkpoint, 1, **parameters), engine_of(checkpoint, 2, **parameters)
    spoil_cache(found)
    assert completions(found, requests) == [completions(expected, [request])[0] for request in requests]
