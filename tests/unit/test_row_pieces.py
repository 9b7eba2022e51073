"""A row's pieces: their counts add up, and the prompt comes first where it was asked for."""

import pytest
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.sequence import Chunk, Completion, Sequence
from llama_engine.text.stop_checker import StopChecker

PROMPT = "Return é"


def _row(max_tokens: int, exclude_input: bool = True, stop_words: tuple[bytes, ...] = ()) -> Sequence:
    request = GenerationRequest(
        prompt=PROMPT, prompt_tokens=(1, 5, 6), max_tokens=max_tokens, stop_words=stop_words,
        exclude_input_in_output=exclude_input,
    )  # fmt: skip
    transcript = StopChecker(min_tokens=0, max_tokens=max_tokens, stop_words=stop_words, end_tokens=(2,))
    return Sequence(request, transcript, None)


def _take_each(row: Sequence, tokens: list[bytes]) -> list[Chunk | None]:
    pieces = []
    for token in tokens:
        row.stop_checker.add(7, token)
        pieces.append(row.take())
    return pieces


def test_tokens_without_a_text_of_their_own_are_not_counted_with_the_next_piece() -> None:
    row = _row(max_tokens=5)
    assert row.take() is None
    half, other = "é".encode()[:1], "é".encode()[1:]
    pieces = _take_each(row, [half, other, b"", b"ab", b"c"])
    assert pieces == [None, Chunk("é", 2), None, Chunk("ab", 2), Chunk("c", 1)]
    assert row.take() is None
    assert row.completion() == Completion("éabc", "length", 3, 5)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("exclude_input", [True, False])
def test_pieces_do_not_add_up_to_the_completion(every: int, exclude_input: bool) -> None:
    row = _row(20, exclude_input, (b"stop",))
    pieces = []
    for number, byte in enumerate("one st🙂 two, st stop".encode(), 1):
        ended = row.stop_checker.add(7, bytes([byte]))
        if (number % every == 0 or ended) and (piece := row.take()) is not None:
            pieces.append(piece)
        if ended:
            break
    completion = row.completion()
    assert "".join(piece.text for piece in pieces) == completion.text
    assert sum(piece.num_tokens for piece in pieces) == completion.num_output_tokens
    assert completion.text.startswith(PROMPT) is not exclude_input
    assert pieces[0].text.startswith(PROMPT) is not exclude_input
    assert all(piece.text for piece in pieces[:-1])


def test_the_last_piece_is_missing_where_it_has_no_text() -> None:
    row = _row(9, stop_words=(b"!",))
    assert _take_each(row, [b"a", b"!"]) == [Chunk("a", 1), Chunk("", 1)]
    assert row.take() is None


def test_the_prompt_waits_for_text_or_comes_twice() -> None:
    row = _row(9, exclude_input=False, stop_words=(b"ab",))
    assert _take_each(row, [b"a", b"x"]) == [Chunk(PROMPT, 1), Chunk("ax", 1)]
