"""The bare engine and the bare forward: answers, timed parts and repeated passes."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.loader import EMBEDDED, Checkpoint
from llama_engine.model.model_runner import ModelRunner
from transformers.models.llama.modeling_llama import LlamaModel

from perf.load.protocols import Request
from perf.overhead.bare import BareEngine
from perf.overhead.passes import Chunk, Head, Pass, Prompts, Step, recording, through_forward, through_slots
from perf.overhead.stopwatch import Node, replacing

REQUESTS = [Request("A dictionary is", 5), Request("Return a list of all", 3), Request("This module provides", 4)]


@pytest.fixture(scope="module", params=["none", "int8"])
def bare(request: pytest.FixtureRequest) -> BareEngine:
    return BareEngine(EMBEDDED, str(request.param), 2, REQUESTS)


def _nothing() -> None:
    pass


def test_a_run_generates_the_requested_tokens(bare: BareEngine) -> None:
    assert bare.run().output_tokens == 12
    assert bare.run(1).output_tokens == 5


def test_a_request_that_is_not_answered_as_asked_is_refused(bare: BareEngine) -> None:
    too_long = Request("A dictionary is", bare.max_model_len + 1)
    with pytest.raises(RuntimeError, match=rf"request 0 asked for {too_long.output_tokens} tokens and got "):
        BareEngine.run(_with_requests(bare, [too_long]))


def _with_requests(bare: BareEngine, requests: list[Request]) -> BareEngine:
    other = object.__new__(BareEngine)
    vars(other).update(vars(bare), _requests=requests)
    return other


def test_every_part_of_the_engine_is_timed(bare: BareEngine) -> None:
    split = bare.split()
    whole = split.whole
    assert {name: part.calls for name, part in whole.parts.items() if name in ("tokenization", "stopping", "head")} == {
        "tokenization": 3,
        "stopping": 12,
        "head": Counter(type(one) for one in split.passes)[Head],
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
    assert all(left >= 0 for left in _rests(whole))


def _rests(node: Node) -> Iterator[float]:
    """The rest of each part."""
    if node.parts:
        yield node.seconds - sum(part.seconds for part in node.parts.values())
    for part in node.parts.values():
        yield from _rests(part)


def test_every_pass_is_recorded_and_repeated(bare: BareEngine) -> None:
    noted = bare.split().passes
    # Two rows at first, of which the second ends after its third token; the third one takes its slot, and a step later
    # than the prompts of the first two the first one ends.
    lengths = [len(bare.checkpoint.tokenizer.encode(request.prompt)) for request in REQUESTS]
    assert noted[:2] == [Prompts(0, (lengths[0], lengths[1])), Head(2)]
    assert sum(one.rows for one in noted if isinstance(one, Head)) == 12
    assert sum(one.last - one.first for one in noted if isinstance(one, Step)) == 12 - 3
    with recording() as again:
        bare.through_slots(noted)
    assert again == noted


def _small(checkpoint: Checkpoint) -> KVCacheShape:
    config = checkpoint.config
    heads = config.num_key_value_heads or config.num_attention_heads
    return KVCacheShape(config.num_hidden_layers, 2, heads, 32, config.head_dim or 0, torch.float32)


PASSES: list[Pass] = [
    Chunk(0, 3, 0),
    Chunk(0, 3, 3),
    Prompts(0, (6, 6)),
    Step(0, 2, 6),
    Head(2),
    Step(0, 2, 7),
]


@pytest.mark.parametrize("through", [through_slots, through_forward])
def test_the_bare_forward_computes_the_models_hidden_states(fp32: Checkpoint, through: Callable[..., float]) -> None:
    """The last step's hidden states are those of all tokens in one pass, for the forward without a mask too."""
    seen: list[torch.Tensor] = []

    def keeping(forward: Callable[..., object]) -> Callable[..., object]:
        def kept(*arguments: object, **named: object) -> object:
            output = forward(*arguments, **named)
            seen.append(output.last_hidden_state)  # type: ignore[attr-defined]
            return output

        return kept

    with replacing(LlamaModel, "forward", keeping):
        assert through(fp32, _small(fp32), PASSES, _nothing) > 0
    assert len(seen) == 5
    with torch.inference_mode():
        whole = fp32.model.model(torch.tensor([[5] * 8])).last_hidden_state
    assert torch.allclose(seen[-1], whole[:, -1:].expand(2, 1, -1), atol=1e-4)


def test_the_engines_methods_are_restored(bare: BareEngine) -> None:
    before = dict(vars(ModelRunner))
    bare.split()
    assert dict(vars(ModelRunner)) == before
