"""Loads whose prompts share prefixes, and their checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_engine.text.tokenizer import read_tokenizer
from transformers import AutoTokenizer, LlamaConfig

from perf import checkpoint
from perf.bench import prefixes as loads
from perf.bench.prefixes import load

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
    requests, warmup = load("small", "chat", 8, 2).requests(words)
    assert [request.turn for request in requests[warmup:]] == [*range(1, 9)] * 2
    firsts = [request.prompt for request in requests if request.turn == 1]
    assert len({prompt[: 5 * loads.SYSTEM_TOKENS] for prompt in firsts}) == 1
    assert len(set(firsts)) == len(firsts) == 10


def test_retrieval_shares_its_document(words: Path) -> None:
    requests, _ = load("small", "retrieval", 1, 4).requests(words)
    assert len({request.prompt[: 5 * loads.DOCUMENT_TOKENS] for request in requests}) == 1
    assert all(20 <= tokens(request.prompt) - loads.DOCUMENT_TOKENS <= 40 for request in requests)


def test_the_longest_chats_and_documents_fit_the_model() -> None:
    length = loads.SYSTEM_TOKENS + loads.TURNS * (loads.MESSAGE_TOKENS[1] + loads.ANSWER_TOKENS[1])
    assert max(length, loads.DOCUMENT_TOKENS + 40 + loads.FINDING_TOKENS) < loads.POSITIONS
