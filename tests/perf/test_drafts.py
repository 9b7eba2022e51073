"""Loads for drafts."""

from __future__ import annotations

import pytest

from perf.bench.drafts import KINDS, MEASURED, TURNS, Kind, load
from perf.checkpoint import EMBEDDED


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_prompts_of_a_kind_are_equal(kind: Kind) -> None:
    loads = [load(kind, users).requests(EMBEDDED)[0] for users in MEASURED]
    prompts = [request.prompt for requests in loads for request in requests if request.turn == 1]
    assert len(set(prompts)) == len(prompts)


def test_a_chats_warm_up_has_its_first_turns() -> None:
    requests, warmup = load("chat", 4).requests(EMBEDDED)
    assert [request.turn for request in requests[:warmup]] == [
        turn for last in (5, 6, 7, 8) for turn in range(1, last + 1)
    ]
    assert [request.turn for request in requests[warmup:]] == [*range(1, len(TURNS) + 1)] * MEASURED[4]
