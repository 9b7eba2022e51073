"""Loads whose prompts share prefixes, their checkpoint and their table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_engine.text.tokenizer import read_tokenizer
from transformers import AutoTokenizer, LlamaConfig

from perf import checkpoint
from perf.bench import prefixes as loads
from perf.bench.prefixes import PrefixLoad
from perf.report import markdown, prefixes
from perf.results_file import RESULTS, Result, read

VOCABULARY = 3072


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    LlamaConfig(vocab_size=VOCABULARY).save_pretrained(folder)
    return folder


def tokens(text: str) -> int:
    return len(text.split())


def test_text_of_words_becomes_the_same_tokens_again(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=VOCABULARY
    )
    folder = checkpoint.words_checkpoint(config, 64, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [4, 5, 3071, 5, 1000]
    text = "".join(map(checkpoint.word, ids))
    assert tokenizer(text)["input_ids"] == [tokenizer.bos_token_id, *ids]
    assert tokenizer.decode(ids) == text
    assert read_tokenizer(folder, LlamaConfig.from_pretrained(folder)).encode(text)[1:] == tuple(ids)
    assert LlamaConfig.from_pretrained(folder).max_position_embeddings == 64


def test_chats_have_eight_turns_and_one_system_prompt(words: Path) -> None:
    requests, warmup = PrefixLoad("small", "chat", 8, 2).requests(words)
    assert [request.turn for request in requests[warmup:]] == [*range(1, 9)] * 2
    firsts = [request.prompt for request in requests if request.turn == 1]
    assert len({prompt[: 5 * loads.SYSTEM_TOKENS] for prompt in firsts}) == 1
    assert len(set(firsts)) == len(firsts) == 10


def test_chats_of_the_warm_up_end_at_different_times(words: Path) -> None:
    requests, warmup = PrefixLoad("small", "chat", 8, 2).requests(words)
    turns = [request.turn for request in requests[:warmup]]
    assert turns == [turn for last in range(1, 9) for turn in range(1, last + 1)]


def test_retrieval_shares_its_document(words: Path) -> None:
    requests, _ = PrefixLoad("small", "retrieval", 1, 4).requests(words)
    assert len({request.prompt[: 5 * loads.DOCUMENT_TOKENS] for request in requests}) == 1
    assert all(20 <= tokens(request.prompt) - loads.DOCUMENT_TOKENS <= 40 for request in requests)


def test_unshared_prompts_share_nothing_from_the_first_word_on(words: Path) -> None:
    requests = [request for users in (1, 8) for request in PrefixLoad("small", "unshared", users, 4).requests(words)[0]]
    assert len({request.prompt[:5] for request in requests}) == len(requests)


@pytest.mark.parametrize("chosen", [loads.SMALL_LOADS, loads.LARGE_LOADS])
def test_every_load_has_a_key_of_its_own_and_fits_the_model(chosen: list[PrefixLoad]) -> None:
    assert len({load.key for load in chosen}) == len(chosen)
    length = loads.SYSTEM_TOKENS + loads.TURNS * (loads.MESSAGE_TOKENS[1] + loads.ANSWER_TOKENS[1])
    assert max(length, loads.DOCUMENT_TOKENS + 40 + loads.FINDING_TOKENS) < loads.POSITIONS


def row(server: str, users: int, rate: float) -> dict[str, Any]:
    ttft = {"p50": 10.0 * rate, "p95": 20.0 * rate}
    head = {"server": server, "title": server, "weights": "INT8", "model": "M", "errors": 0}
    return head | {
        "load": {"mix": "unshared", "concurrency": users},
        "tokens_per_second": rate,
        "time_to_first_token_ms": ttft,
        "hit_rate": 0.5,
    }


def test_a_line_of_the_table_has_a_load_with_every_server() -> None:
    on, off = "triton_llama_int8_prefix_cache_on", "triton_llama_int8_prefix_cache_off"
    rows = [row(on, 8, 2.0), row(on, 1, 1.0), row(off, 8, 4.0)]
    measurements = {f"prefixes/{number}": entry for number, entry in enumerate(rows)}
    content = {**read(RESULTS / "bench-article.json").content, "measurements": measurements}
    text = markdown(Result("x.json", content), prefixes)
    assert "| M | unshared | 8 | 20.0 / 40.0 | 40.0 / 80.0 | 2.00 | 4.00 | 50 % | 50 % |" in text
    assert "| M | unshared | 1 | 10.0 / 20.0 | – | 1.00 | – | 50 % | – |" in text
