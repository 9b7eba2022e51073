"""Tokenizers of model families in the engine: their tokens, their text, the tokens that end an answer."""

from pathlib import Path

import pytest
from llama_engine.request.end_tokens import find_end_tokens
from llama_engine.text.output_text import OutputText
from llama_engine.text.tokenizer import Tokenizer, read_tokenizer
from model_families import BY_NAME, FAMILIES, Family
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoConfig, GenerationConfig

TEXT = "Def  a 12,\n\n\tñ 한🙂 a"

pytestmark = pytest.mark.filterwarnings("ignore:.*tokenizer_class.*")


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture
def tokenizer(family: Family, tmp_path: Path) -> Tokenizer:
    config = AutoConfig.from_pretrained(family.save(tmp_path))
    return read_tokenizer(tmp_path, config)


def _text(tokenizer: Tokenizer, tokens: tuple[int, ...]) -> str:
    return b"".join(tokenizer.vocabulary.token_bytes[token] for token in tokens).decode()


def test_tokens_are_those_of_tokenizer_json(tokenizer: Tokenizer, tmp_path: Path) -> None:
    expected = FastTokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids
    assert tokenizer.encode(TEXT) == tuple(expected)


def test_a_text_survives_its_tokens(tokenizer: Tokenizer) -> None:
    assert _text(tokenizer, tokenizer.encode_inside(TEXT)).removeprefix(" ") == TEXT


def test_a_bos_in_the_prompt_is_not_doubled(family: Family, tokenizer: Tokenizer) -> None:
    bos = family.special[0] if family.bos else ""
    tokens = tokenizer.encode(f"{bos}def")
    number = tokenizer.pretrained.bos_token_id
    assert tokens.count(number) == (1 if family.bos else 0)


def test_each_end_token_ends_the_answer_and_has_no_text(family: Family, tokenizer: Tokenizer, tmp_path: Path) -> None:
    ends = find_end_tokens(GenerationConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path), tokenizer)
    assert {*family.ends} <= {*tokenizer.pretrained.convert_ids_to_tokens([*ends])}
    for name in family.ends:
        (end,) = tokenizer.encode_inside(name)
        output = OutputText(min_tokens=0, max_tokens=16, stop_words=[], end_tokens=ends)
        for token in tokenizer.encode_inside("Yes"):
            assert not output.add(token, tokenizer.vocabulary.token_bytes[token])
        assert output.add(end, tokenizer.vocabulary.token_bytes[end]), name
        assert output.text.lstrip() == "Yes"


@pytest.mark.parametrize("name", ["seed-oss", "qwen3"])
def test_the_markers_of_reasoning_are_text_whether_special_or_not(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    tokenizer = read_tokenizer(family.save(tmp_path), AutoConfig.from_pretrained(tmp_path))
    start, end = [token for token in (*family.special, *family.text) if token.endswith("think>")]
    assert _text(tokenizer, tokenizer.encode_inside(f"{start}a{end}b")) == f"{start}a{end}b"
