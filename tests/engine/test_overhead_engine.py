"""The bare engine and the bare forward: answers, timed parts and repeated passes."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import EMBEDDED, Checkpoint
from llama_engine.model.model_runner import ModelRunner
from transformers.models.llama.modeling_llama import LlamaModel

from perf.load.protocols import Request
from perf.overhead.bare import BareEngine
from perf.overhead.passes import recording, through_forward, through_slots
from perf.overhead.stopwatch import flatten

REQUESTS = [Request("A dictionary is", 5), Request("Return a list of all", 3), Request("This module provides", 4)]


@pytest.fixture(scope="module", params=["none", "int8"])
def bare(request: pytest.FixtureRequest) -> BareEngine:
    return BareEngine(EMBEDDED, str(request.param), 2, REQUESTS)


def _nothing() -> None:
    pass


def test_a_request_that_is_not_answered_as_asked_is_refused(bare: BareEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bare.run(1).seconds > 0
    too_long = Request("A dictionary is", bare.max_model_len + 1)
    monkeypatch.setattr(bare, "requests", [too_long])
    with pytest.raises(RuntimeError, match=rf"request 0 asked for {too_long.output_tokens} tokens and got "):
        bare.run()


def test_every_part_of_the_engine_is_timed(bare: BareEngine) -> None:
    before = dict(vars(ModelRunner))
    _, whole, noted = bare.split()
    assert dict(vars(ModelRunner)) == before
    assert {name: part.calls for name, part in whole.parts.items() if name in ("tokenization", "stopping", "head")} == {
        "tokenization": 3,
        "stopping": 12,
        "head": sum(not one.width for one in noted),
    }
    for phase in ("prefill", "decode steps"):
        forward = whole.parts[phase].parts["transformers' forward"]
        layers = bare.checkpoint.config.num_hidden_layers
        assert {name: part.calls / forward.calls for name, part in forward.parts.items()} == {
            "matrices": 7 * layers,
            "attention": layers,
            "norms": 2 * layers + 1,
            "cache": layers,
        }
    assert {"sampling", "slots", "detokenization"} <= whole.parts.keys()
    assert all(part.seconds >= 0 for part in flatten(whole, 12))


def test_every_pass_is_recorded_and_repeated(bare: BareEngine) -> None:
    _, _, noted = bare.split()
    # Two rows at first, of which the second ends after its third token; the third one takes its slot, and a step later
    # than the prompts of the first two the first one ends.
    lengths = [len(bare.checkpoint.tokenizer.encode(request.prompt)) for request in REQUESTS]
    assert [(one.rows, one.start, one.width) for one in noted[:2]] == [(2, 0, max(lengths[:2])), (2, 0, 0)]
    assert sum(one.rows for one in noted if not one.width) == 12
    assert sum(one.rows for one in noted if one.width == 1) == 12 - 3
    with recording() as again:
        through_slots(bare.checkpoint, bare.engine.plan.shape, noted, bare.settle)
    assert again == noted


@pytest.mark.parametrize("through", [through_slots, through_forward])
def test_the_bare_forward_computes_the_models_hidden_states(fp32: Checkpoint, through: Callable[..., float]) -> None:
    """The last step's hidden states are those of all tokens in one pass, for the forward without a mask too."""
    config = fp32.config
    heads = config.num_key_value_heads or config.num_attention_heads
    shape = KVCacheShape(config.num_hidden_layers, 2, heads, 32, config.head_dim or 0, torch.float32)
    token = torch.full((2, 1), 5)
    with torch.inference_mode(), recording() as passes:
        model = ModelRunner(fp32, KVCache(shape, token.device))
        model.prefill_chunk(0, [5] * 3, 0)
        model.prefill_chunk(0, [5] * 3, 3)
        hidden = model.prefill(0, [[5] * 6] * 2)
        model.decode(0, token, torch.full_like(token, 6), model.decode_span(6))
        model.logits(hidden)
        model.decode(0, token, torch.full_like(token, 7), model.decode_span(7))
    seen: list[torch.Tensor] = []
    forward = LlamaModel.forward

    def keeping(*arguments: object, **named: object) -> object:
        output = forward(*arguments, **named)
        seen.append(output.last_hidden_state)
        return output

    with patch.object(LlamaModel, "forward", keeping):
        assert through(fp32, shape, passes, _nothing) > 0
    assert len(seen) == 5
    with torch.inference_mode():
        whole = fp32.model.model(torch.tensor([[5] * 8])).last_hidden_state
    assert torch.allclose(seen[-1], whole[:, -1:].expand(2, 1, -1), atol=1e-4)
