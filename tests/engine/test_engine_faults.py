"""What the engine does when passes fail: it repeats them on parts of their rows, and only who is at fault fails."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine.engines import completions, engine_of
from engine.faulty import FAILED, only_fails, penalized, penalized_request
from engine.forward_passes import ForwardPass, before_each_head, watching
from engine.stepping import run_requests
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.errors import GenerationError
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import Checkpoint
from llama_engine.sampling.sampler import Sampler

CURSED_LENGTH = 100


def _with_a_cursed_one(checkpoint: Checkpoint, place: int) -> list[GenerationRequest]:
    """Four requests, one of them with a prompt so long that a pass shows that it is in it."""
    requests = penalized(checkpoint, 4)
    requests[place] = penalized_request(checkpoint, place, range(CURSED_LENGTH, CURSED_LENGTH + 1))
    return requests


@pytest.fixture
def engine(fp32: Checkpoint) -> Engine:
    return engine_of(fp32, 4)


@pytest.mark.parametrize("fatal", [0, 1, 3, 8, 9])
def test_a_pass_that_fails_once_costs_a_row_or_changes_one(
    fp32: Checkpoint, engine: Engine, fatal: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Six requests on four slots: pass 0 reads four prompts, pass 8 the other two; the rest are decode steps."""
    requests = penalized(fp32, 6)
    expected = completions(engine, requests)

    def fail(one: ForwardPass) -> None:
        if one.number == fatal:
            raise RuntimeError("CUDA error: a secret of the machine")

    with watching(fp32, fail):
        run = run_requests(engine, requests)
    assert run.results == expected
    assert run.errors == 1
    assert "a secret of the machine" in caplog.text


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("first_bad_position", [None, CURSED_LENGTH, CURSED_LENGTH + 3])
def test_a_row_that_always_fails_takes_others_down(
    fp32: Checkpoint, engine: Engine, place: int, first_bad_position: int | None
) -> None:
    """In the prefill (None), in its first decode step, and in a later one; alone on either side of the split."""
    requests = _with_a_cursed_one(fp32, place)
    expected = completions(engine, requests)

    def fail(one: ForwardPass) -> None:
        prompts = one.width > 1
        cursed = one.width == CURSED_LENGTH if prompts else int(one.positions.max()) >= (first_bad_position or 1 << 20)
        if cursed and prompts == (first_bad_position is None):
            raise RuntimeError("no kernel for this")

    with watching(fp32, fail):
        run = run_requests(engine, requests)
    only_fails(run, place, expected)
    assert run.errors == 3, "not 4 rows, 2 and 1"
    assert engine.generate(requests) == expected


def test_a_machine_on_which_everything_fails_leaves_a_row_unanswered_or_never_recovers(
    fp32: Checkpoint, engine: Engine
) -> None:
    requests = penalized(fp32, 6)
    expected = completions(engine, requests)

    def fail(one: ForwardPass) -> None:
        if one.number >= 3:
            raise RuntimeError("no more")

    with watching(fp32, fail):
        run = run_requests(engine, requests)
    assert {str(outcome) for outcome in run.results} == {FAILED}
    assert engine.generate(requests) == expected


def _exhausted_beyond(tokens: int) -> Callable[[ForwardPass], None]:
    def fail(one: ForwardPass) -> None:
        if one.tokens.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return fail


def test_prompts_that_do_not_fit_together_are_not_read_apart(fp32: Checkpoint, engine: Engine) -> None:
    requests = [penalized_request(fp32, index, range(30, 60)) for index in range(4)]
    expected = completions(engine, requests)
    with watching(fp32, _exhausted_beyond(60)):
        run = run_requests(engine, requests)
    assert run.results == expected
    assert run.errors == 3, "not 4 prompts, 2 and 2"


def test_a_prompt_too_long_for_the_device_is_not_told_so_or_takes_others_down(fp32: Checkpoint, engine: Engine) -> None:
    requests = _with_a_cursed_one(fp32, 2)
    expected = completions(engine, requests)
    with watching(fp32, _exhausted_beyond(CURSED_LENGTH - 1)):
        run = run_requests(engine, requests)
    message = f"the device's memory was exhausted by this request alone, of {CURSED_LENGTH} prompt tokens"
    only_fails(run, 2, expected, message)


@pytest.mark.parametrize("fatal", ["first", "last"])
def test_a_chunk_that_does_not_fit_takes_others_down(fp32: Checkpoint, fatal: str) -> None:
    engine = engine_of(fp32, 4, prefill_tokens="48")
    requests = _with_a_cursed_one(fp32, 1)
    expected = completions(engine, requests)
    start = {"first": 0, "last": 96}[fatal]

    def fail(one: ForwardPass) -> None:
        if one.width > 1 and int(one.positions[0, 0]) == start and one.width == (48 if start == 0 else 4):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with watching(fp32, fail):
        run = run_requests(engine, requests)
    failed = [index for index, outcome in enumerate(run.results) if outcome != expected[index]]
    assert 1 in failed
    # Nobody but those whose own chunks failed: prompts of 49 tokens and more have a first chunk of 48, too.
    assert all(len(requests[index].prompt_tokens) > 48 for index in failed)
    assert engine.generate(requests) == expected


@pytest.mark.parametrize("too_many", [0, 1, 2])
def test_a_failure_of_the_head_costs_more_than_it_must(fp32: Checkpoint, engine: Engine, too_many: int) -> None:
    """A head that takes at most so many rows; 0 rows is none at all."""
    requests = penalized(fp32, 4)
    expected = completions(engine, requests)

    def fail(rows: int) -> None:
        if rows > too_many:
            raise RuntimeError("no room for logits")

    with before_each_head(fp32, fail):
        run = run_requests(engine, requests)
    if too_many:
        assert run.results == expected
    else:
        assert {str(outcome) for outcome in run.results} == {FAILED}
    assert engine.generate(requests) == expected


@pytest.mark.parametrize(("owner", "name"), [(KVCache, "wipe"), (KVCache, "move"), (Sampler, "admit")])
def test_a_device_that_can_do_nothing_any_more_leaves_a_row_unanswered(
    fp32: Checkpoint, engine: Engine, owner: type[object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some errors a GPU refuses every further call: what the engine does about a failure fails as well."""
    requests = penalized(fp32, 6)
    # One that ends before the others, so that its slot is handed on.
    requests[0] = replace(requests[0], max_tokens=3, min_tokens=3)
    expected = completions(engine, requests)

    def refuse(*args: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def fail(one: ForwardPass) -> None:
        if name == "wipe":
            refuse()

    with monkeypatch.context() as broken, watching(fp32, fail):
        broken.setattr(owner, name, refuse)
        run = run_requests(engine, requests)
    assert any(isinstance(outcome, GenerationError) for outcome in run.results)
    assert all(isinstance(outcome, GenerationError) or outcome in expected for outcome in run.results)
    assert engine.generate(requests) == expected
