"""The bare engine and its passes alone: answers, timed parts and repeated passes."""

from statistics import StatisticsError

import pytest
from llama_engine.model.cpu_runner import CompiledLlama
from llama_engine.model.loader import EMBEDDED

from perf.load.protocols import Request
from perf.overhead.account import full_steps
from perf.overhead.bare import BareEngine, FullStep, Run
from perf.overhead.passes import RUNNERS, Pass, recording, repeated
from perf.overhead.stopwatch import flatten
from perf.roofline.physics import Costs
from perf.roofline.rates import DeviceRates, Weights

REQUESTS = [Request("A dictionary is", 5), Request("Return a list of all", 3), Request("This module provides", 4)]


@pytest.fixture(scope="module", params=["none", "int8"])
def bare(request: pytest.FixtureRequest) -> BareEngine:
    return BareEngine(EMBEDDED, str(request.param), 2, REQUESTS)


def test_a_request_that_is_not_answered_as_asked_is_refused(bare: BareEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bare.run(1).seconds > 0
    for runner in RUNNERS:
        monkeypatch.delattr(runner, "decode")
    with pytest.raises(RuntimeError, match="request 0 asked for 5 tokens and got GenerationError"):
        bare.run()


def test_steps_that_decode_every_slot_without_a_prefill_are_timed_with_the_positions_they_read(
    bare: BareEngine,
) -> None:
    # Both rows decode twice until the second one ends, and then once more beside the third one.
    lengths = [len(bare.checkpoint.tokenizer.encode(request.prompt)) for request in REQUESTS]
    cached = [sum(lengths[:2]) + 2 * step for step in (1, 2)] + [lengths[0] + 4 + lengths[2] + 1]
    full_steps = bare.run().full_steps
    assert [step.positions for step in full_steps] == cached
    assert all(step.seconds > 0 for step in full_steps)


def test_a_full_step_stands_beside_its_passes_and_the_time_to_read_its_bytes(bare: BareEngine) -> None:
    shape, config = bare.engine.plan.shape, bare.checkpoint.config
    rates = DeviceRates("cpu", 1, {1: 1e9}, {"fp32": 1e11})
    rows = ("prefill", 2), ("logits", 2), ("decode", 2), ("logits", 2), ("decode", 1), ("logits", 1), ("decode", 2)
    noted = [Pass(method, count, count, lambda _: None) for method, count in (*rows, ("logits", 2))]
    # The first run was disturbed in its second step, the second one in its first.
    runs = [Run(9.0, [FullStep(one, 90), FullStep(other, 110)]) for one, other in ((0.01, 7.0), (8.0, 0.03))]
    seconds = [[9.0, 9.0, 0.01, 0.002, 9.0, 9.0, 5.0, 0.002], [9.0, 9.0, 0.01, 4.0, 9.0, 9.0, 0.01, 0.002]]
    found = full_steps(bare, runs, noted, seconds, rates)
    weights: Weights = "int8" if "int8" in bare.checkpoint.info.linears else "fp32"
    size = Costs(config, weights, rates).weight_bytes + 100 * shape.bytes_per_token
    assert found == {
        "rows": 2,
        "step_ms": 20.0,
        "passes_ms": 12.0,
        "rest_share": 0.4,
        "bytes": size,
        "limit_ms": pytest.approx(size / 1e6, abs=1e-3),
        "share_of_limit": pytest.approx(size / 1e9 / 0.02, abs=1e-4),
    }
    with pytest.raises(StatisticsError, match="at least one data point"):
        full_steps(bare, [Run(9.0)], noted, seconds, rates)


def test_every_part_of_the_engine_is_timed_and_every_pass_recorded_and_repeated(bare: BareEngine) -> None:
    before = [dict(vars(runner)) for runner in RUNNERS]
    _, whole, noted = bare.split()
    assert [dict(vars(runner)) for runner in RUNNERS] == before
    assert {"sampling", "slots", "detokenization", "stopping", "head"} <= whole.parts.keys()
    assert whole.parts["tokenization"].calls == 3
    layers = bare.checkpoint.config.num_hidden_layers
    for phase in ("prefill", "decode steps"):
        forward = whole.parts[phase].parts["forward pass"]
        calls = {name: part.calls / forward.calls for name, part in forward.parts.items()}
        if isinstance(bare.checkpoint.model, CompiledLlama):
            assert calls == {}, "the compiled kernels fuse the parts"
        else:
            assert calls.keys() == {"norms", "attention", "KV cache"}
            assert calls["norms"] == 2 * layers
    assert all(part.seconds >= 0 for part in flatten(whole, 12))
    # Two rows at first, of which the second ends after its third token; the third one takes its slot, and a step later
    # than the prompts of the first two the first one ends.
    lengths = [len(bare.checkpoint.tokenizer.encode(request.prompt)) for request in REQUESTS]
    assert [one[:3] for one in noted[:2]] == [("prefill", 2, sum(lengths[:2])), ("logits", 2, 2)]
    assert sum(one.rows for one in noted if one.method == "logits") == 12
    assert sum(one.rows for one in noted if one.method == "decode") == 12 - 3
    with recording() as again:
        seconds = repeated(bare.checkpoint, bare.engine.plan.shape, noted, bare.settle)
    assert [one[:3] for one in again] == [one[:3] for one in noted]
    assert len(seconds) == len(noted)
    assert min(seconds) > 0
