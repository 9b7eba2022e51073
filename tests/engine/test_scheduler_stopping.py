"""The end of a scheduler, and what goes wrong inside it: whoever was accepted is answered, once."""

import random

import pytest
from engine.engines import completions, engine_of
from engine.prompts import random_prompt
from engine.scheduling import SECONDS, House, answers_of, house, outcome_of, scheduler_threads
from llama_engine import scheduler
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine, StepResult
from llama_engine.errors import GenerationError, Unavailable
from llama_engine.model.loader import Checkpoint
from llama_engine.observability.stats import Stats
from llama_engine.sequence import Completion, Sequence
from llama_engine.tickets import Ticket

STOPPING = "the server is stopping"


def _request(checkpoint: Checkpoint, index: int, max_tokens: int = 8) -> GenerationRequest:
    tokens = random_prompt(checkpoint.tokenizer, range(12, 13), random.Random(index))[1]
    return GenerationRequest(prompt="", prompt_tokens=tokens, max_tokens=max_tokens, min_tokens=max_tokens)


def _crowd(home: House, checkpoint: Checkpoint, max_tokens: int = 8) -> list[Ticket]:
    """Two rows that run, in their second decode step, and three that wait."""
    tickets = home.submit_all([_request(checkpoint, index, max_tokens) for index in range(5)], stream=True)
    home.pace.let(2)
    return tickets


def test_stopping_cuts_running_rows_short_or_lets_waiting_ones_in(fp32: Checkpoint) -> None:
    with house(fp32, 2) as home:
        tickets = _crowd(home, fp32)
        stopping = home.begin_to_stop(SECONDS)
        home.pace.let(1)
        assert all(ticket.result is not None for ticket in tickets[2:])
        assert all(ticket.result is None for ticket in tickets[:2])
        home.pace.run_free()
        stopping.join(SECONDS)
        assert home.delivery.close(SECONDS)
        assert scheduler_threads() == []
        assert home.pace.prompts == [12], "somebody was let in"
        alone = completions(engine_of(fp32, 1), [ticket.row.request for ticket in tickets[:2]])
        assert [outcome_of(ticket) for ticket in tickets[:2]] == alone
        for ticket in tickets[2:]:
            assert isinstance(ticket.result, Unavailable)
            assert str(outcome_of(ticket)) == STOPPING


def test_rows_outlast_the_bound_or_are_not_answered(fp32: Checkpoint) -> None:
    with house(fp32, 2) as home:
        tickets = _crowd(home, fp32, max_tokens=400)
        stopping = home.begin_to_stop(0)
        home.pace.run_free()
        stopping.join(SECONDS)
        assert scheduler_threads() == []
        assert home.delivery.close(SECONDS)
        assert [str(outcome_of(ticket)) for ticket in tickets] == [STOPPING] * 5
        assert home.engine.used_slots == 0
        assert tickets[0].row.stop_checker.num_tokens == 3, "steps after the bound"


def test_who_comes_after_the_end_waits_for_ever(fp32: Checkpoint) -> None:
    with house(fp32, 2) as home:
        home.scheduler.stop(SECONDS)
        late = home.submit(_request(fp32, 1))
        home.scheduler.wait_until_admitted([late])
        home.scheduler.wait_until_finished([late])
        assert home.delivery.close(SECONDS)
        assert str(outcome_of(late)) == STOPPING


def test_a_step_that_hangs_keeps_the_end_or_the_answers(fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "HANG_SECONDS", 0.2)
    with house(fp32, 2) as home:
        tickets = _crowd(home, fp32)
        home.scheduler.stop(0)
        assert [str(ticket.result) for ticket in tickets] == [STOPPING] * 5
        (hanging,) = scheduler_threads()
        assert hanging.name == "engine"
        # It comes back after all, with tokens for rows that were answered long ago.
        home.pace.run_free()
        hanging.join(SECONDS)
        assert home.delivery.close(SECONDS)
        assert [str(outcome_of(ticket)) for ticket in tickets] == [STOPPING] * 5
        home.meter.close(SECONDS)
        assert home.registry.counts["llama_requests_total unavailable"] == 5
        assert home.registry.counts["llama_step_errors_total"] == 0


class _BrokenMeter(Stats):
    """Fails at the end of every row, and at every third step."""

    steps = 0

    def ended(self, ticket: Ticket) -> None:
        raise RuntimeError("no number")

    def stepped(self, step: StepResult, now: float, running: int, waiting: int) -> None:
        self.steps += 1
        if self.steps % 3 == 0:
            raise RuntimeError("no number")


def test_an_error_of_the_scheduler_itself_leaves_a_row_unanswered_or_is_the_end(fp32: Checkpoint) -> None:
    with house(fp32, 2, meter=_BrokenMeter) as home:
        home.pace.run_free()
        tickets = [home.submit(_request(fp32, index, 1 + index % 3), stream=index % 2 == 0) for index in range(12)]
        home.finish(tickets)
        good = [ticket for ticket in tickets if isinstance(ticket.result, Completion)]
        assert len(good) >= 2
        alone = completions(engine_of(fp32, 1), [ticket.row.request for ticket in good])
        assert [ticket.result for ticket in good] == alone
        assert all(isinstance(ticket.result, GenerationError | Completion) for ticket in tickets)
        assert home.engine.used_slots == 0, "rows that were answered keep their slots"


def test_an_engine_that_cannot_drop_a_row_leaves_others_unanswered(
    fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with house(fp32, 3) as home:
        tickets = home.submit_all([_request(fp32, index, 9) for index in range(4)])
        home.pace.let(2)
        answers_of(tickets[0]).cancel()
        drop, failures = Engine.drop, iter([True])

        def refuse_once(engine: Engine, row: Sequence) -> None:
            if next(failures, False):
                raise RuntimeError("device lost")
            drop(engine, row)

        monkeypatch.setattr(Engine, "drop", refuse_once)
        outcomes = home.finish(tickets)
        assert str(outcomes[0]) == "the request was cancelled"
        assert all(isinstance(outcome, GenerationError) for outcome in outcomes[1:3])
        assert [outcomes[3]] == completions(engine_of(fp32, 1), [tickets[3].row.request])


def test_a_reply_that_raises_takes_other_answers_with_it(fp32: Checkpoint) -> None:
    with house(fp32, 2) as home:
        tickets = home.submit_all([_request(fp32, index) for index in range(4)], stream=True)
        answers_of(tickets[1]).refuses = "send"
        home.pace.run_free()
        home.scheduler.wait_until_finished(tickets)
        home.scheduler.stop(SECONDS)
        assert home.delivery.close(SECONDS)
        others = [tickets[0], *tickets[2:]]
        alone = completions(engine_of(fp32, 1), [ticket.row.request for ticket in others])
        assert [outcome_of(ticket) for ticket in others] == alone
