"""Rows that are given up: out of time, or cancelled, while they wait and while they run."""

import random
import time

import pytest
from engine.engines import completions, engine_of
from engine.prompts import random_prompt
from engine.scheduling import answers_of, house
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import Cancelled, Unavailable
from llama_engine.model.loader import Checkpoint
from llama_engine.tickets import Ticket


def _request(checkpoint: Checkpoint, size: int, max_tokens: int = 40) -> GenerationRequest:
    tokens = random_prompt(checkpoint.tokenizer, range(size, size + 1), random.Random(size))[1]
    return GenerationRequest(
        prompt="", prompt_tokens=tokens, max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.8, seed=size,
        repetition_penalty=1.2,
    )  # fmt: skip


def _is_as_alone(checkpoint: Checkpoint, ticket: Ticket) -> bool:
    return [ticket.result] == completions(engine_of(checkpoint, 1), [ticket.row.request])


def test_a_row_out_of_time_is_read_or_not_told(fp32: Checkpoint) -> None:
    with house(fp32, 1) as home:
        running = home.submit(_request(fp32, 10))
        home.pace.let(2)
        late = home.submit(_request(fp32, 33), deadline=time.monotonic() - 1)
        patient = home.submit(_request(fp32, 21, 3), deadline=time.monotonic() + 3600)
        home.pace.let(1)
        assert running.result is None, "it waited for the slot instead of its time"
        assert isinstance(late.result, Unavailable)
        home.scheduler.wait_until_admitted([late])
        home.finish([running, late, patient])
        assert str(late.result) == "the request's time was up before it got a slot"
        assert home.pace.prompts == [10, 21]
        assert _is_as_alone(fp32, running)
        assert _is_as_alone(fp32, patient)


def test_the_deadline_counts_for_a_row_that_has_a_slot(fp32: Checkpoint) -> None:
    with house(fp32, 1) as home:
        running = home.submit(_request(fp32, 10, 4), deadline=time.monotonic() + 3600)
        home.pace.let(1)
        running.deadline = 0.0
        home.finish([running])
        assert _is_as_alone(fp32, running)


def test_a_row_cancelled_while_it_waits_is_read(fp32: Checkpoint) -> None:
    with house(fp32, 1) as home:
        running = home.submit(_request(fp32, 10, 9))
        home.pace.let(2)
        gone, other = home.submit(_request(fp32, 33)), home.submit(_request(fp32, 21, 3))
        answers_of(gone).cancel()
        home.pace.let(1)
        assert isinstance(gone.result, Cancelled)
        assert running.result is None
        home.finish([running, gone, other])
        assert home.pace.prompts == [10, 21]
        assert _is_as_alone(fp32, running)
        assert _is_as_alone(fp32, other)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_row_keeps_its_slot_or_changes_its_neighbours(fp32: Checkpoint, stream: bool) -> None:
    with house(fp32, 3) as home:
        tickets = home.submit_all([_request(fp32, size, 20) for size in (10, 12, 14)], stream=stream)
        home.pace.let(4)
        waiting = home.submit(_request(fp32, 21, 3))
        answers_of(tickets[0]).cancel()
        assert not waiting.left_the_queue
        tokens = tickets[0].row.stop_checker.num_tokens
        home.pace.let(1)
        # The pass that was on when it was noticed, and none after it.
        assert tickets[0].row.stop_checker.num_tokens == tokens + 1
        assert isinstance(tickets[0].result, Cancelled)
        assert waiting.left_the_queue
        home.finish([*tickets, waiting])
        assert all(_is_as_alone(fp32, ticket) for ticket in (*tickets[1:], waiting))
        assert str(tickets[0].result) == "the request was cancelled"


def test_a_row_cancelled_in_the_middle_of_its_prompt_is_read_on(fp32: Checkpoint) -> None:
    with house(fp32, 2, prefill_tokens="16") as home:
        running = home.submit(_request(fp32, 10, 20))
        home.pace.let(2)
        long = home.submit(_request(fp32, 90))
        home.pace.let(4)
        answers_of(long).cancel()
        home.pace.let(1)
        home.finish([running, long])
        assert isinstance(long.result, Cancelled)
        assert 1 <= home.pace.prompts.count(16) <= 3
        assert _is_as_alone(fp32, running)


def test_a_reply_that_cannot_be_asked_is_taken_for_cancelled_or_hides_the_others(fp32: Checkpoint) -> None:
    with house(fp32, 2) as home:
        first, gone = home.submit_all([_request(fp32, 10, 9), _request(fp32, 12, 200)])
        home.pace.let(1)
        answers_of(first).refuses = "is_cancelled"
        answers_of(gone).cancel()
        home.pace.let(1)
        assert isinstance(gone.result, Cancelled)
        home.finish([first, gone])
        assert _is_as_alone(fp32, first)
