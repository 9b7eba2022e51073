"""Loads of the benchmarks: prompts that differ, and those that share a prefix."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from perf.bench import drafts, prefixes
from perf.checkpoint import EMBEDDED


# The edits are of every function of Python's library, which takes seconds to parse.
@pytest.mark.parametrize("kind", [kind for kind in drafts.KINDS if "edit" not in kind])
def test_no_two_prompts_of_a_kind_of_drafts_are_equal(kind: drafts.Kind) -> None:
    loads = [drafts.load(kind, users).requests(EMBEDDED)[0] for users in drafts.MEASURED]
    prompts = [request.prompt for requests in loads for request in requests if request.turn == 1]
    assert len(set(prompts)) == len(prompts)


def test_chats_have_eight_turns_and_one_system_prompt(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=3072).save_pretrained(tmp_path)
    requests, warmup = prefixes.load("small", "chat", 8, 2).requests(tmp_path)
    assert [request.turn for request in requests[warmup:]] == [*range(1, 9)] * 2
    firsts = [request.prompt for request in requests if request.turn == 1]
    assert len({prompt[: 5 * prefixes.SYSTEM_TOKENS] for prompt in firsts}) == 1
    assert len(set(firsts)) == len(firsts) == 10
