"""A sequence's chunks: their counts add up, and the prompt comes first on request."""

import pytest
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.sequence import Chunk, Completion, Sequence
from llama_engine.text.stop_checker import StopChecker

PROMPT = "Return é"


def _sequence(max_tokens: int, exclude_input: bool = True, stop_words: tuple[bytes, ...] = ()) -> Sequence:
    request = GenerationRequest(
        prompt=PROMPT, prompt_tokens=(1, 5, 6), max_tokens=max_tokens, stop_words=stop_words,
        exclude_input_in_output=exclude_input,
    )  # fmt: skip
    return Sequence(request, StopChecker(min_tokens=0, max_tokens=max_tokens, stop_words=stop_words, end_tokens=(2,)))


def _chunk_of_each(sequence: Sequence, tokens: list[bytes]) -> list[Chunk | None]:
    chunks = []
    for token in tokens:
        sequence.append(7, token)
        chunks.append(sequence.next_chunk())
    return chunks


def test_tokens_without_text_are_counted_with_the_next_chunk() -> None:
    sequence = _sequence(max_tokens=5)
    assert sequence.next_chunk() is None
    half, other = "é".encode()[:1], "é".encode()[1:]
    chunks = _chunk_of_each(sequence, [half, other, b"", b"ab", b"c"])
    assert chunks == [None, Chunk("é", 2), None, Chunk("ab", 2), Chunk("c", 1)]
    assert sequence.next_chunk() is None
    assert sequence.result == sequence.completion() == Completion("éabc", "length", 3, 5)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("exclude_input", [True, False])
def test_chunks_join_to_the_completion(every: int, exclude_input: bool) -> None:
    sequence = _sequence(20, exclude_input, (b"stop",))
    chunks = []
    for number, byte in enumerate("one st🙂 two, st stop".encode(), 1):
        sequence.append(7, bytes([byte]))
        if (number % every == 0 or sequence.result) and (chunk := sequence.next_chunk()) is not None:
            chunks.append(chunk)
        if sequence.result:
            break
    completion = sequence.completion()
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert sum(chunk.num_tokens for chunk in chunks) == completion.num_output_tokens
    assert completion.text.startswith(PROMPT) is not exclude_input
    assert chunks[0].text.startswith(PROMPT) is not exclude_input
    assert all(chunk.text for chunk in chunks[:-1])


def test_the_last_chunk_comes_even_without_text() -> None:
    sequence = _sequence(9, stop_words=(b"!",))
    assert _chunk_of_each(sequence, [b"a", b"!"]) == [Chunk("a", 1), Chunk("", 1)]
    assert sequence.next_chunk() is None


def test_the_prompt_comes_at_once_and_only_once() -> None:
    sequence = _sequence(9, exclude_input=False, stop_words=(b"ab",))
    assert _chunk_of_each(sequence, [b"a", b"x"]) == [Chunk(PROMPT, 1), Chunk("ax", 1)]
