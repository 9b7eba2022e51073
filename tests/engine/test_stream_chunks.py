"""A sequence's chunks: their counts add up, and the prompt comes first on request."""

import pytest
from llama_engine.engine.events import Chunk, Completion
from llama_engine.engine.sequence import Sequence
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.output_text import OutputText

PROMPT = "Return é"
HALF, OTHER = "é".encode()[:1], "é".encode()[1:]
LETTERS = [b"a", b"b", b"c", b"d", b"e", b"f"]


@pytest.mark.parametrize(
    ("values", "interval", "tokens", "chunks"),
    [
        # Tokens without text are counted with the next chunk.
        ({}, 1, [HALF, OTHER, b"", b"ab", b"c"], [None, ("é", 2), None, ("ab", 2), ("c", 1)]),
        # The last chunk comes even without text.
        ({}, 1, [b"a", b"!"], [("a", 1), ("", 1)]),
        # The prompt comes at once and only once, although a stop string may have begun.
        ({"exclude_input_in_output": False}, 1, [b"?", b"x!"], [(PROMPT, 1), ("?x", 1)]),
        # After the first chunk, the next waits for the interval or the end.
        ({}, 3, LETTERS, [("a", 1), None, None, ("bcd", 3), None, ("ef", 2)]),
        # The first token with text, too, goes out at once.
        ({}, 3, [HALF, OTHER, b"a", b"b", b"c!"], [None, ("é", 2), None, None, ("abc", 3)]),
        # A character or a stop string that is incomplete after the interval delays the chunk, or leaves its end out.
        ({}, 3, [b"a", b"b", b"c", HALF, OTHER, b"!"], [("a", 1), None, None, ("bc", 3), None, ("é", 2)]),
        ({}, 3, [b"a", HALF, OTHER, b"?", b"b", b"c"], [("a", 1), None, None, ("é", 3), None, ("?bc", 2)]),
        # Tokens within the request's interval share a chunk: a token comes every 10.1 ms.
        ({"stream_interval_ms": 7}, 1, LETTERS, [(letter.decode(), 1) for letter in LETTERS]),
        ({"stream_interval_ms": 20}, 1, LETTERS, [("a", 1), None, ("bc", 2), None, ("de", 2), ("f", 1)]),
    ],
)  # fmt: skip
def test_a_chunk_has_the_text_that_is_certain_once_its_interval_is_over(
    values: dict[str, object],
    interval: int,
    tokens: list[bytes],
    chunks: list[tuple[str, int] | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("llama_engine.engine.chunk_cutter.time.monotonic", lambda: now)
    stops = tokens[-1].endswith(b"!")
    request = GenerationRequest(PROMPT, (1, 5, 6), **values)  # type: ignore[arg-type]  # values are fields
    output = OutputText(min_tokens=0, max_tokens=len(tokens) + stops, stop_words=[b"!", b"?!"], end_tokens=(2,))
    sequence = Sequence(request, output, stream_interval=interval)
    assert sequence.chunk_cutter.next() is None
    made = []
    for token in tokens:
        sequence.append(7, token)
        made.append(sequence.chunk_cutter.next())
        now += 0.0101
    assert made == [None if chunk is None else Chunk(*chunk) for chunk in chunks]
    assert sequence.chunk_cutter.next() is None
    text = "".join(chunk.text for chunk in made if chunk is not None)
    reason, stop_reason = ("stop", "!") if stops else ("length", "")
    assert sequence.result == sequence.completion() == Completion(text, reason, 3, len(tokens), stop_reason)
