"""A list of prompts: its order, and what happens to the others when one fails."""

from __future__ import annotations

import pytest
from triton_llama import Completion, OverloadedError, RejectedInputError, SamplingParams, ServerError
from triton_llama.many import ManyRequests


def completion(text: str) -> Completion:
    return Completion(text, "stop", 1, 1, "id", 0)


def test_outcomes_keep_the_order_of_the_prompts() -> None:
    many = ManyRequests(["a", "b", "c"], SamplingParams(), keep_errors=False)
    taken = [many.take() for _ in range(3)]
    for one in reversed(taken):
        assert one is not None
        many.record(one[0], completion(str(one[0])))
    assert [getattr(outcome, "text", None) for outcome in many.outcomes()] == ["0", "1", "2"]
    assert many.take() is None


def test_after_a_failure_nothing_more_is_sent_and_the_first_error_in_order_is_raised() -> None:
    many = ManyRequests(["a", "b", "c", "d"], SamplingParams(), keep_errors=False)
    many.take(), many.take(), many.take()
    many.record(2, ServerError("third"))
    assert many.take() is None
    many.record(1, OverloadedError("second"))
    many.record(0, completion("first"))
    with pytest.raises(OverloadedError, match="second") as error:
        many.outcomes()
    assert error.value.prompt_index == 1


def test_kept_errors_stand_in_their_places_and_stop_nothing() -> None:
    many = ManyRequests(["a", "\ud800", "c"], SamplingParams(), keep_errors=True)
    many.record(0, ServerError("first"))
    one = many.take()
    assert one is not None
    two = many.take()
    assert two is not None
    assert two[0] == 2
    many.record(2, completion("third"))
    assert [type(outcome) for outcome in many.outcomes()] == [ServerError, RejectedInputError, Completion]


def test_a_list_with_a_prompt_that_cannot_be_sent_is_refused_before_anything_is() -> None:
    with pytest.raises(RejectedInputError) as error:
        ManyRequests(["a", "\ud800"], SamplingParams(), keep_errors=False)
    assert error.value.prompt_index == 1
