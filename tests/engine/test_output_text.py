"""When a completion finishes, where its text ends, and its deltas, for every tokenization of the text."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from llama_engine.text.output_text import OutputText

END = 99
EMOJI = "🙂".encode()


def _output(stop_words: Sequence[bytes] = (), min_tokens: int = 0, max_tokens: int = 1000) -> OutputText:
    return OutputText(min_tokens=min_tokens, max_tokens=max_tokens, stop_words=stop_words, end_tokens={END})


def _tokenizations(text: str) -> Iterator[list[bytes]]:
    """Yield all 2^(n-1) ways to cut n bytes into tokens that are not empty."""
    content = text.encode()
    for count in range(len(content)):
        for cuts in combinations(range(1, len(content)), count):
            yield [content[start:end] for start, end in zip((0, *cuts), (*cuts, len(content)), strict=True)]


def _add(output: OutputText, tokens: Sequence[bytes | None]) -> list[str]:
    """Add tokens until the completion finishes; None is the end token. Return the deltas."""
    deltas = []
    for token in tokens:
        finished = output.add(END if token is None else 1, token or b"")
        deltas.append(output.next_delta())
        if finished:
            break
    return deltas


@pytest.mark.parametrize(
    ("text", "stop_words", "expected"),
    [
        ("a STOP. bc", [" STOP."], "a"),
        ("é🙂ñé", ["🙂ñ"], "é"),
        ("éé\u00ea", ["\u00ea"], "éé"),  # begins with the same byte as its neighbours
        ("aabaabaac", ["aabaac"], "aab"),  # a false start
        ("aaaa", ["aaa"], ""),
        ("xabcd", ["abc", "b"], "xa"),  # the first to end, not the first to begin
        ("xabcd", ["abcx", "bcd"], "xa"),  # a partial match contains the match
        ("__abcdef", ["abc", "abcd"], "__"),
        *((f"a{character}", ["never"], f"a{character}") for character in ("🙂", "\u0000")),
    ],
)
def test_the_text_ends_before_the_first_stop_string_in_every_tokenization(
    text: str, stop_words: list[str], expected: str
) -> None:
    """And characters are whole, however they are split over tokens."""
    words = [word.encode() for word in stop_words]
    for tokens in _tokenizations(text):
        output = _output(words)
        deltas = "".join(_add(output, tokens))
        reason = "" if text == expected else "stop"
        assert (output.text, deltas, output.finish_reason) == (expected, expected, reason), tokens
        # It finished with the token that completed the stop string: without that token there is none.
        before = b"".join(tokens[: output.num_tokens - 1])
        assert not any(word in before for word in words), tokens


@pytest.mark.parametrize(
    ("stop_words", "min_tokens", "max_tokens", "tokens", "deltas", "end"),
    [
        ([b"x"], 3, 100, [b"x", b"ax", b"b", b"x"], ["x", "ax", "b", ""], "stop"),  # none before min_tokens counts
        ([b"xy"], 2, 100, [b"ax", b"y"], ["a", ""], "stop"),  # one that token min_tokens completes does
        ([], 0, 2, [b"a", b"b"], ["a", "b"], "length"),
        ([b"b"], 0, 2, [b"a", b"b"], ["a", ""], "stop"),  # a stop string in the last token wins over the length
        ([], 0, 1, [None], [""], "stop"),  # so does an end token
        # A stop string before min_tokens is text, but may begin the one that counts.
        ([b"xx"], 3, 100, [b"axx", b"b", b"x", b"x"], ["ax", "xb", "", ""], "stop"),
        ([b"aab"], 0, 4, [b"a", b"", b"aa", b"c"], ["", "", "a", "aac"], "length"),  # a token may have no text
        # An incomplete character is held back, and replaced at the end.
        ([], 0, 3, [EMOJI[:2], EMOJI[2:] + b"\xc3", b""], ["", "🙂", "\ufffd"], "length"),
    ],
)
def test_a_delta_holds_back_what_may_not_be_text(
    stop_words: list[bytes], min_tokens: int, max_tokens: int, tokens: list[bytes | None], deltas: list[str], end: str
) -> None:
    output = _output(stop_words, min_tokens, max_tokens)
    assert _add(output, tokens) == deltas
    assert (output.text, output.finish_reason) == ("".join(deltas), end)
    assert output.num_tokens == len(tokens)


@pytest.mark.parametrize(
    ("stop_words", "tokens", "text", "reason"),
    [
        ([b"cd", b"d"], [(1, b"ab"), (1, b"cd")], "ab", "cd"),  # both end there: the longer one
        ([b"d", "ñ".encode()], [(1, "añ".encode())], "a", "ñ"),
        ([], [(1, b"ab"), (5, b"cd")], "ab", "5"),  # a stop token is no part of the text
        ([b"b"], [(1, b"a"), (5, b"b")], "a", "5"),
        ([], [(1, b"ab"), (END, b"<end_of_turn>")], "ab", ""),  # nor is an end token that is no special token
        ([], [(6, b"ab"), (6, b"cd"), (6, b"ef")], "abcdef", None),
    ],
)
def test_the_stop_reason_is_the_stop_string_or_the_id_of_the_stop_token(
    stop_words: list[bytes], tokens: list[tuple[int, bytes]], text: str, reason: str | None
) -> None:
    # END is a stop token, too: an end token all the same.
    output = OutputText(
        min_tokens=0, max_tokens=3, stop_words=stop_words, end_tokens={END}, stop_tokens=frozenset({5, END})
    )
    finished = [output.add(token, token_bytes) for token, token_bytes in tokens]
    assert finished == [False] * (len(tokens) - 1) + [True]
    assert (output.text, output.stop_reason) == (text, reason or "")
    assert output.finish_reason == ("length" if reason is None else "stop")
    assert output.next_delta() == text
