"""The text of the comparison is cut into rows, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_engine.text.tokenizer import Tokenizer

from perf.quality.text import Rows, TextError, cut, from_text, read


def rows_of(file: Path, tokenizer: Tokenizer) -> Rows:
    return from_text(read(file), file.name, tokenizer.pretrained, 64)


def test_every_token_is_predicted_once_and_every_row_begins_with_bos() -> None:
    ids = list(range(10, 33))
    rows = cut(ids, 1, 8)
    assert [row[0] for row in rows] == [1] * 4
    assert [token for row in rows for token in row[1:]] == ids
    assert [len(row) for row in rows] == [8, 8, 8, 3]


def test_without_a_bos_no_row_of_one_token_is_left() -> None:
    assert cut(range(9), None, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("bos", "context"), [(1, 1), (None, 1), (1, 0)])
def test_rows_without_room_for_two_tokens_are_refused(bos: int | None, context: int) -> None:
    with pytest.raises(ValueError, match=f"context is {context}"):
        cut([1, 2, 3], bos, context)


def test_a_file_is_read_unchanged(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    # Two newlines, and characters of more than one byte.
    file.write_bytes("Ein schöner Text – mit\r\nZeilen. ".encode() * 40)
    rows = rows_of(file, tokenizer)
    assert rows.origin == {"text": "text.txt", "characters": 32 * 40}
    assert max(map(len, rows.tokens)) == 64
    assert (
        b"".join(tokenizer.vocabulary.token_bytes[token] for row in rows.tokens for token in row[1:])
        == file.read_bytes()
    )
    assert rows.predicted == sum(len(row) - 1 for row in rows.tokens)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "text.txt is empty"),
        (b" \n\t\n", "text.txt is empty"),
        (b"four words of text", "text.txt has [0-9]+ tokens to predict; 100 are needed at least"),
        (b"caf\xe9 " * 100, "text.txt is not UTF-8: .* at byte 3"),
    ],
)
def test_an_unusable_text_is_refused(tokenizer: Tokenizer, tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(TextError, match=message):
        rows_of(file, tokenizer)


def test_a_missing_file_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"can't read .*absent\.txt: No such file"):
        rows_of(tmp_path / "absent.txt", tokenizer)
