"""The load generator against a real Triton; test_load_generator.py has each protocol with a small server."""

from __future__ import annotations

from triton_local.server import LocalTriton

from perf.load.generator import drive
from perf.load.protocols import Request, Target
from perf.load.summary import summarize

PROMPT = "Return a list of"
# The embedded checkpoint has room for 2,048 tokens.
REQUESTS = [Request(PROMPT, tokens) for tokens in (2, 12, 5, 1, 3, 9)] + [Request(PROMPT, 4000)]


def test_all_tokens_of_joined_chunks_are_counted(streaming: LocalTriton) -> None:
    target = Target("ours", "triton_stream", f"http://{streaming.http_url}", "llama")
    run = drive(target, REQUESTS, 3, 1, 120.0)
    *records, refused = run.measured
    assert [record.error for record in records] == [""] * 5
    assert [record.output_tokens for record in records] == [12, 5, 1, 3, 9]
    for record in records:
        assert 1 <= len(record.token_times) <= record.output_tokens
        assert list(record.token_times) == sorted(record.token_times)
        assert (record.first_token, record.last_token) == (record.token_times[0], record.token_times[-1])
        assert record.prompt_tokens == records[0].prompt_tokens
    assert "max_tokens" in refused.error
    summary = summarize(run)
    assert (summary["requests"], summary["errors"]) == (6, 1)
