"""Nobody waits for another one's length: who comes later and wants less is through earlier."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from server.clients import Answer, ask, generate
from server.metrics import PENDING, Metrics
from server.streams import Call, GrpcStream
from triton_local.server import LocalTriton

LONG = {"text_input": "Return a list of the", "max_tokens": 300, "min_tokens": 300, "temperature": 0.0}
SHORT = {"text_input": "The class", "max_tokens": 5, "min_tokens": 5, "temperature": 1.0, "seed": 6}


@pytest.mark.parametrize("config", ["triton", "streaming"])
def test_a_short_request_waits_for_a_long_one(config: str, request: pytest.FixtureRequest) -> None:
    server: LocalTriton = request.getfixturevalue(config)
    alone = ask(server, generate, **SHORT)
    metrics = Metrics(server)
    with Call(server, LONG) as long:
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 1, "the long one runs")
        # Several, one after another, while the same long one runs.
        for _ in range(3):
            assert ask(server, generate, **SHORT) == alone
            assert not long.done()
        assert metrics.grown("llama_steps_total") < 300, "they were through before the long one's last step"
        answer = long.outcome()
    assert isinstance(answer, Answer)
    metrics.wait_for(300 + 3 * 5, "llama_generated_tokens_total")
    # Each of them shared all of its steps but the one that read its prompt, or even that.
    assert metrics.grown("llama_steps_total") <= 300 + 3
    assert answer == ask(server, generate, **LONG)


def test_a_short_stream_waits_for_a_long_one(streaming: LocalTriton) -> None:
    metrics = Metrics(streaming)
    with GrpcStream(streaming) as stream:
        stream.ask({**LONG, "stream": True}, request_id="long")
        order = [stream.next()]
        stream.ask({**SHORT, "stream": True}, request_id="short")
        while not order[-1].final or order[-1].request_id != "long":
            order.append(stream.next())
        ends = [response.request_id for response in order if response.final]
        assert ends == ["short", "long"]
        # Pieces of the long one between those of the short one: they share steps.
        first = next(index for index, response in enumerate(order) if response.request_id == "short")
        last = next(index for index, response in enumerate(order) if response.final)
        assert "long" in {response.request_id for response in order[first:last]}
    metrics.wait_for(305, "llama_generated_tokens_total")
    assert metrics.grown("llama_steps_total") <= 301


def test_who_comes_first_does_not_enter_first(narrow: LocalTriton) -> None:
    """One slot is taken for good; three that want the same go through the other one, first come, first served."""
    metrics = Metrics(narrow)
    equal = SHORT | {"max_tokens": 20, "min_tokens": 20}
    with ExitStack() as calls:
        long = [calls.enter_context(Call(narrow, LONG | {"max_tokens": 500, "min_tokens": 500})) for _ in range(2)]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both slots are taken")
        waiting = [calls.enter_context(Call(narrow, equal))]
        metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "the first one waits in the model")
        for count in (1, 2):
            waiting.append(calls.enter_context(Call(narrow, equal)))
            metrics.wait(lambda now, count=count: now.now(PENDING) == count, "the next one waits in Triton")  # type: ignore[misc]  # a lambda's default is not seen
        long[0].cancel()
        for index, call in enumerate(waiting):
            assert isinstance(call.outcome(), Answer)
            # With one slot between them, nobody behind is through when one is.
            assert not any(behind.done() for behind in waiting[index + 2 :])
        assert not long[1].done()
        long[1].cancel()
