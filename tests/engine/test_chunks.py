"""A sequence's chunks: their counts add up, and the prompt comes first on request."""

import pytest
from llama_engine.engine.responses import Chunk, Completion
from llama_engine.engine.sequence import Sequence
from llama_engine.request.parser import GenerationRequest
from llama_engine.text.stop_checker import StopChecker

PROMPT = "Return é"
HALF, OTHER = "é".encode()[:1], "é".encode()[1:]


@pytest.mark.parametrize(
    ("exclude_input", "tokens", "chunks", "reason"),
    [
        # Tokens without text are counted with the next chunk.
        (True, [HALF, OTHER, b"", b"ab", b"c"], [None, Chunk("é", 2), None, Chunk("ab", 2), Chunk("c", 1)], "length"),
        # The last chunk comes even without text.
        (True, [b"a", b"x!"], [Chunk("a", 1), Chunk("x", 1)], "stop"),
        (True, [b"a", b"!"], [Chunk("a", 1), Chunk("", 1)], "stop"),
        # The prompt comes at once and only once, although a stop string may have begun.
        (False, [b"?", b"x!"], [Chunk(PROMPT, 1), Chunk("?x", 1)], "stop"),
    ],
)
def test_chunks_are_made_of_tokens_as_soon_as_their_text_is_certain(
    exclude_input: bool, tokens: list[bytes], chunks: list[Chunk | None], reason: str
) -> None:
    request = GenerationRequest(
        prompt=PROMPT, prompt_tokens=(1, 5, 6), max_tokens=5, exclude_input_in_output=exclude_input
    )
    stop_checker = StopChecker(min_tokens=0, max_tokens=5, stop_words=[b"!", b"?!"], end_tokens=(2,))
    sequence = Sequence(request, stop_checker)
    assert sequence.next_chunk() is None
    made = []
    for token in tokens:
        sequence.append(7, token)
        made.append(sequence.next_chunk())
    assert made == chunks
    assert sequence.next_chunk() is None
    text = "".join(chunk.text for chunk in chunks if chunk is not None)
    stop_reason = "!" if reason == "stop" else ""
    assert sequence.result == sequence.completion() == Completion(text, reason, 3, len(tokens), stop_reason)


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        ([b"a", b"b", b"c", b"d", b"e", b"f"], [Chunk("a", 1), None, None, Chunk("bcd", 3), None, Chunk("ef", 2)]),
        # The first token with text, too, goes out at once.
        ([HALF, OTHER, b"a", b"b", b"c!"], [None, Chunk("é", 2), None, None, Chunk("abc", 3)]),
        # A character or a stop string that is incomplete after the interval delays the chunk, or leaves its end out.
        ([b"a", b"b", b"c", HALF, OTHER, b"!"], [Chunk("a", 1), None, None, Chunk("bc", 3), None, Chunk("é", 2)]),
        ([b"a", HALF, OTHER, b"?", b"b", b"c"], [Chunk("a", 1), None, None, Chunk("é", 3), None, Chunk("?bc", 2)]),
    ],
)
def test_after_the_first_chunk_the_next_waits_for_the_interval_or_the_end(
    tokens: list[bytes], chunks: list[Chunk | None]
) -> None:
    request = GenerationRequest(prompt=PROMPT, prompt_tokens=(1, 5, 6), max_tokens=6)
    stop_checker = StopChecker(min_tokens=0, max_tokens=6, stop_words=[b"!", b"?!"], end_tokens=(2,))
    sequence = Sequence(request, stop_checker, stream_interval=3)
    made = []
    for token in tokens:
        sequence.append(7, token)
        made.append(sequence.next_chunk())
    assert made == chunks


@pytest.mark.parametrize(
    ("milliseconds", "chunks"),
    [
        (0, [Chunk("a", 1), Chunk("b", 1), Chunk("c", 1), Chunk("d", 1), Chunk("e", 1), Chunk("f", 1)]),
        (7, [Chunk("a", 1), Chunk("b", 1), Chunk("c", 1), Chunk("d", 1), Chunk("e", 1), Chunk("f", 1)]),
        (20, [Chunk("a", 1), None, Chunk("bc", 2), None, Chunk("de", 2), Chunk("f", 1)]),
    ],
)
def test_tokens_within_the_requests_interval_share_a_chunk(
    milliseconds: int, chunks: list[Chunk | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("llama_engine.engine.sequence.time.monotonic", lambda: now)
    request = GenerationRequest(PROMPT, (1, 5, 6), max_tokens=6, stream_interval_ms=milliseconds)
    sequence = Sequence(request, StopChecker(min_tokens=0, max_tokens=6, stop_words=[], end_tokens=(2,)))
    made = []
    for token in (b"a", b"b", b"c", b"d", b"e", b"f"):
        sequence.append(7, token)
        made.append(sequence.next_chunk())
        now += 0.0101
    assert made == chunks
