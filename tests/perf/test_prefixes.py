"""Loads whose prompts share prefixes, their checkpoint and their table."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from llama_engine.text.tokenizer import read_tokenizer
from transformers import AutoTokenizer, LlamaConfig

from perf import checkpoint
from perf.bench import prefixes as loads
from perf.bench.prefixes import PrefixLoad
from perf.load.protocols import Request
from perf.report import Result, prefixes, read
from perf.results_file import RESULTS

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
    rounds = [PrefixLoad("small", "unshared", 1, 4, number).requests(words)[0] for number in (1, 2)]
    requests: list[Request] = list(itertools.chain(*rounds))
    assert len({request.prompt[:5] for request in requests}) == len(requests)


@pytest.mark.parametrize("chosen", [loads.SMALL_LOADS, loads.LARGE_LOADS])
def test_every_load_has_a_key_of_its_own_and_fits_the_model(chosen: list[PrefixLoad]) -> None:
    assert len({load.key for load in chosen}) == len(chosen)
    length = loads.SYSTEM_TOKENS + loads.TURNS * (loads.MESSAGE_TOKENS[1] + loads.ANSWER_TOKENS[1])
    assert max(length, loads.DOCUMENT_TOKENS + 40 + loads.FINDING_TOKENS) < loads.POSITIONS


def row(server: str, kind: str, number: int, rate: float, **more: object) -> dict[str, Any]:
    load = {"kind": kind, "round": number, "concurrency": 8}
    ttft = {"p50": 10.0 * rate, "p95": 20.0 * rate}
    figures = {"tokens_per_second": rate, "first_turn_ttft_ms": ttft, "latency_ms": {}, "errors": 0, "hit_rate": 0.5}
    return {"server": server, "title": server, "weights": "INT8", "model": "M", "load": load, **figures, **more}


def of(*rows: dict[str, Any]) -> Result:
    content = dict(read(RESULTS / "bench.json").content)
    keys = [f"prefixes/small/{entry['load']['kind']}/{number}" for number, entry in enumerate(rows)]
    return Result("x.json", content | {"measurements": dict(zip(keys, rows, strict=True))})


def test_a_table_row_has_the_median_of_its_rounds() -> None:
    on, off = "triton_llama_int8_prefix_cache_on", "triton_llama_int8_prefix_cache_off"
    rounds = [row(on, "unshared", number, rate) for number, rate in enumerate((1.0, 3.0, 2.0))]
    text = prefixes(of(*rounds, row(off, "unshared", 1, 4.0)))
    assert "| M | unshared | 8 | 20.0 / 40.0 | 40.0 / 80.0 | 2.00 | 4.00 | 50 % |" in text


def test_first_turns_of_a_chat_have_a_row_of_their_own() -> None:
    later = {"p50": 1.0, "p95": 2.0}
    text = prefixes(of(row("vllm_prefix_cache", "chat", 1, 3.0, weights="BF16", later_turns_ttft_ms=later)))
    assert "| first turns of a chat | 8 | 30.0 / 60.0 | – | – |" in text
    assert "| later turns | 8 | 1.00 / 2.00 | 3.00 | 50 % |" in text
