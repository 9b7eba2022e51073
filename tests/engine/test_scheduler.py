"""Rows that enter and leave between two steps: who waits, who is overtaken, and what is sent."""

import random
import threading

import pytest
from engine.engines import completions, engine_of
from engine.forward_passes import ForwardPass, watching
from engine.prompts import random_prompt
from engine.scheduling import SECONDS, answers_of, house
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import GenerationError
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Completion
from llama_engine.tickets import Ticket


def _request(checkpoint: Checkpoint, index: int, max_tokens: int, size: int = 12) -> GenerationRequest:
    tokens = random_prompt(checkpoint.tokenizer, range(size, size + 1), random.Random(index))[1]
    return GenerationRequest(
        prompt="", prompt_tokens=tokens, max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.8, seed=index,
        frequency_penalty=1.0,
    )  # fmt: skip


def _alone(checkpoint: Checkpoint, tickets: list[Ticket]) -> list[Completion]:
    engine = engine_of(checkpoint, 1)
    return [completions(engine, [ticket.row.request])[0] for ticket in tickets]


def _by_end(tickets: list[Ticket]) -> list[Ticket]:
    return sorted(tickets, key=lambda ticket: ticket.ended)


def test_a_short_row_waits_for_a_long_one_that_came_before(fp32: Checkpoint) -> None:
    with house(fp32, 3) as home:
        long = home.submit(_request(fp32, 1, 30))
        home.pace.let(4)
        short = home.submit(_request(fp32, 2, 3))
        home.pace.let(8)
        assert short.result is not None
        assert long.result is None
        # Pass 5 had begun when the short one came; it is read by pass 6, with one decode step of its own in 7 and in 8.
        assert long.row.stop_checker.num_tokens < 14
        assert home.finish([long, short]) == _alone(fp32, [long, short])


def test_rows_that_come_at_any_time_get_other_texts_or_are_overtaken(fp32: Checkpoint) -> None:
    randomness = random.Random(4)
    with house(fp32, 3, prefill_tokens="16") as home:
        first = home.submit(_request(fp32, 0, 20))
        tickets = [first]
        for index in range(1, 16):
            home.pace.let(randomness.randint(0, 3))
            tickets.append(home.submit(_request(fp32, index, randomness.randint(1, 9), randomness.choice((5, 20, 50)))))
        assert home.finish(tickets) == _alone(fp32, tickets)
        entered = [ticket.entered for ticket in tickets]
        assert entered == sorted(entered), "who came later got a slot before"
        started = [ticket.started for ticket in tickets]
        assert started == sorted(started), "who came later started before"


def test_a_row_starves_under_a_stream_of_short_ones(fp32: Checkpoint) -> None:
    """Whenever a slot is free somebody is waiting; the long prompt still has its turn, in its place."""
    with house(fp32, 2, prefill_tokens="16") as home:
        requests = [_request(fp32, index, 4) for index in range(25)]
        requests[4] = _request(fp32, 4, 4, size=90)
        tickets = home.submit_all(requests)
        home.finish(tickets)
        long, after = tickets[4], tickets[5:]
        assert all(ticket.entered >= long.entered for ticket in after)
        assert long.ended < after[-1].ended
        assert home.pace.prompts.count(16) == 5
        assert all(ticket.started > long.started for ticket in after)


def test_waiting_for_seats_returns_before_there_is_one(fp32: Checkpoint) -> None:
    with house(fp32, 2) as home:
        taken = home.submit_all([_request(fp32, index, count) for index, count in enumerate((6, 9))])
        home.pace.let(1)
        home.scheduler.wait_until_admitted(taken)
        third = home.submit(_request(fp32, 3, 2))
        seen: list[int] = []

        def wait() -> None:
            home.scheduler.wait_until_admitted([third])
            seen.append(sum(ticket.result is not None for ticket in taken))

        waiter = threading.Thread(target=wait)
        waiter.start()
        home.pace.let(3)
        assert not third.left_the_queue
        assert waiter.is_alive()
        home.pace.run_free()
        waiter.join(SECONDS)
        assert seen[0] >= 1
        home.finish([*taken, third])


def test_waiting_for_a_seat_that_is_sure_takes_a_step(fp32: Checkpoint) -> None:
    """Triton tells its batcher of no request while `execute` runs, and then looks half a second later."""
    with house(fp32, 2) as home:
        running = home.submit(_request(fp32, 0, 6))
        home.pace.let(1)
        # The next step is held, so nobody enters a slot; one is free.
        sure = home.submit(_request(fp32, 1, 4))
        home.scheduler.wait_until_admitted([sure])
        assert not sure.left_the_queue
        unsure = home.submit(_request(fp32, 2, 4))
        waiter = threading.Thread(target=home.scheduler.wait_for_seats, args=([unsure],))
        waiter.start()
        home.pace.let(2)
        assert sure.left_the_queue
        assert waiter.is_alive()
        home.pace.run_free()
        waiter.join(SECONDS)
        assert not waiter.is_alive()
        home.finish([running, sure, unsure])


@pytest.mark.parametrize("prompted", [False, True])
def test_pieces_that_are_sent_are_another_text(fp32: Checkpoint, prompted: bool) -> None:
    with house(fp32, 4) as home:
        prompt = "def f(🙂):"
        request = GenerationRequest(
            prompt=prompt, prompt_tokens=fp32.tokenizer.encode(prompt), max_tokens=25,
            stop_words=(b"never", b"\n\n\n\n"), temperature=1.0, seed=5, exclude_input_in_output=not prompted,
        )  # fmt: skip
        streamed, plain = home.submit(request, stream=True), home.submit(request)
        both = home.finish([streamed, plain])
        assert both[0] == both[1]
        pieces = answers_of(streamed).pieces
        assert isinstance(both[0], Completion)
        assert "".join(piece.text for piece in pieces) == both[0].text
        assert sum(piece.num_tokens for piece in pieces) == both[0].num_output_tokens
        assert len(pieces) > 5
        assert answers_of(plain).pieces == []


def test_a_failure_of_everything_is_not_answered_or_the_last_that_is(fp32: Checkpoint) -> None:
    broken = threading.Event()
    broken.set()

    def fail(one: ForwardPass) -> None:
        if broken.is_set():
            raise RuntimeError("no kernel")

    with house(fp32, 2) as home, watching(fp32, fail):
        home.pace.run_free()
        failed = [home.submit(_request(fp32, index, 5), stream=True) for index in range(5)]
        home.scheduler.wait_until_finished(failed)
        broken.clear()
        good = home.submit(_request(fp32, 9, 5))
        *outcomes, last = home.finish([*failed, good])
        assert all(isinstance(outcome, GenerationError) for outcome in outcomes)
        assert [last] == _alone(fp32, [good])
