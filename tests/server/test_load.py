"""The load generator against a real Triton, over both of its protocols."""

from __future__ import annotations

from triton_local.server import LocalTriton

from perf.load.arrivals import Closed, Poisson
from perf.load.generator import drive
from perf.load.protocols import Protocol, Request, Target
from perf.load.summary import summarize

PROMPT = "Return a list of"
# The embedded checkpoint has room for 512 tokens.
REQUESTS = [Request(PROMPT, tokens) for tokens in (2, 12, 5, 1, 3, 9)] + [Request(PROMPT, 4000)]


def target(server: LocalTriton, protocol: Protocol) -> Target:
    return Target("ours", protocol, f"http://{server.http_url}", "llama")


def test_all_tokens_of_joined_chunks_are_counted(streaming: LocalTriton) -> None:
    run = drive(target(streaming, "triton_stream"), REQUESTS, Closed(3), 1, 120.0)
    *records, refused = run.measured
    assert [record.error for record in records] == [""] * 5
    assert [record.output_tokens for record in records] == [12, 5, 1, 3, 9]
    for record in records:
        assert 1 <= len(record.token_times) <= record.output_tokens
        assert list(record.token_times) == sorted(record.token_times)
        assert (record.first_token, record.last_token) == (record.token_times[0], record.token_times[-1])
        assert record.prompt_tokens == records[0].prompt_tokens
    assert "max_tokens" in refused.error
    summary = summarize(run, None)
    assert (summary["requests"], summary["errors"]) == (6, 1)
    assert summary["whole_run"]["output_tokens"] == 32  # type: ignore[index]


def test_all_tokens_of_a_unary_answer_are_counted(triton: LocalTriton) -> None:
    *records, refused = drive(target(triton, "triton_generate"), REQUESTS, Poisson(100.0, 1), 0, 120.0).records
    assert [(record.error, record.output_tokens) for record in records] == [("", n) for n in (2, 12, 5, 1, 3, 9)]
    assert {(record.first_token, record.token_times) for record in records} == {(None, ())}
    assert "HTTP 400" in refused.error
    assert "max_tokens" in refused.error
