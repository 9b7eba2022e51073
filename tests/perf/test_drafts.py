"""Loads for drafts, and their table."""

from __future__ import annotations

from typing import Any

import pytest

from perf.bench.drafts import KINDS, MEASURED, TURNS, DraftLoad, Kind
from perf.checkpoint import EMBEDDED
from perf.report import drafts, markdown
from perf.results_file import RESULTS, Result, read


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_prompts_of_a_kind_are_equal(kind: Kind) -> None:
    loads = [DraftLoad(kind, users).requests(EMBEDDED)[0] for users in MEASURED]
    prompts = [request.prompt for requests in loads for request in requests if request.turn == 1]
    assert len(set(prompts)) == len(prompts)


def test_requests_of_the_warm_up_end_at_different_times() -> None:
    requests, warmup = DraftLoad("summary", 8).requests(EMBEDDED)
    assert [request.fields["max_tokens"] for request in requests[:warmup]] == [68, 75, 83, 90, 98, 105, 113, 120]
    assert {request.fields["max_tokens"] for request in requests[warmup:]} == {120}


def test_a_chats_warm_up_has_its_first_turns() -> None:
    requests, warmup = DraftLoad("chat", 4).requests(EMBEDDED)
    assert [request.turn for request in requests[:warmup]] == [
        turn for last in (5, 6, 7, 8) for turn in range(1, last + 1)
    ]
    assert [request.turn for request in requests[warmup:]] == [*range(1, len(TURNS) + 1)] * MEASURED[4]


def row(server: str, rate: float, **more: float) -> dict[str, Any]:
    load = {"mix": "edit", "concurrency": 8}
    return {"server": server, "title": server, "weights": "INT8", "load": load, "tokens_per_second": rate, **more}


def test_a_line_of_the_table_has_a_server_with_and_without_drafts() -> None:
    off, auto = "triton_llama_int8_drafts_off", "triton_llama_int8_drafts_auto"
    rows = [row(off, 100.0), row(auto, 250.0, drafted_share=0.5), row("llama_cpp_q4_1_drafts_none", 50.0)]
    measurements = {str(number): entry for number, entry in enumerate(rows)}
    content = {**read(RESULTS / "bench-article.json").content, "measurements": measurements}
    assert "| edit | 8 | 100 | 250 | 2.50 × | 50 % | 50.0 |" in markdown(Result("x.json", content), drafts)
