"""When a completion finishes, where its text ends, and its deltas, for every tokenization of the text."""

import random
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import pytest
from llama_engine.text.stop_checker import StopChecker

END = 99
EMOJI = "🙂".encode()


def _checker(stop_words: Sequence[bytes] = (), min_tokens: int = 0, max_tokens: int = 1000) -> StopChecker:
    return StopChecker(min_tokens=min_tokens, max_tokens=max_tokens, stop_words=stop_words, end_tokens={END})


def _tokenizations(text: str) -> Iterator[list[bytes]]:
    """Yield all 2^(n-1) ways to cut n bytes into tokens that are not empty."""
    content = text.encode()
    for count in range(len(content)):
        for cuts in combinations(range(1, len(content)), count):
            yield [content[start:end] for start, end in zip((0, *cuts), (*cuts, len(content)), strict=True)]


def _add(stop_checker: StopChecker, tokens: Sequence[bytes | None]) -> list[str]:
    """Add tokens until the completion finishes; None is the end token. Return the deltas."""
    deltas = []
    for token in tokens:
        finished = stop_checker.add(END if token is None else 1, token or b"")
        deltas.append(stop_checker.next_delta())
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
        ("__abcdef", ["cd", "ab"], "__"),
        ("__abcdef", ["abc", "abcd"], "__"),
        ("__abcdef", ["zzz", "f"], "__abcde"),
        ("__abcdef", ["__abcdef"], ""),
        *((f"a{character}", ["never"], f"a{character}") for character in ("🙂", "☂️", "e\u0301", "\u0000", "𝔘")),
    ],
)
def test_the_text_ends_before_the_first_stop_string_in_every_tokenization(
    text: str, stop_words: list[str], expected: str
) -> None:
    """And characters are whole, however they are split over tokens."""
    words = [word.encode() for word in stop_words]
    for tokens in _tokenizations(text):
        stop_checker = _checker(words)
        deltas = "".join(_add(stop_checker, tokens))
        reason = "" if text == expected else "stop"
        assert (stop_checker.text, deltas, stop_checker.finish_reason) == (expected, expected, reason), tokens
        # It finished with the token that completed the stop string: without that token there is none.
        before = b"".join(tokens[: stop_checker.num_tokens - 1])
        assert not any(word in before for word in words), tokens


@pytest.mark.parametrize(
    ("stop_words", "min_tokens", "max_tokens", "tokens", "deltas", "end"),
    [
        ([b"x"], 3, 100, [b"x", b"ax", b"b", b"x"], ["x", "ax", "b", ""], "stop"),  # none before min_tokens counts
        ([b"xy"], 2, 100, [b"ax", b"y"], ["a", ""], "stop"),  # one that token min_tokens completes does
        ([], 0, 2, [b"a", b"b"], ["a", "b"], "length"),
        ([b"b"], 0, 2, [b"a", b"b"], ["a", ""], "stop"),  # a stop string in the last token wins over the length
        ([], 0, 1, [None], [""], "stop"),  # so does an end token
        ([], 0, 100, [b"a", None], ["a", ""], "stop"),
        # A partial match is held back until the next token rules it out.
        ([b"\n\n"], 0, 100, [b"a", b"\n", b"b", b"\n", None], ["a", "", "\nb", "", "\n"], "stop"),
        # A stop string before min_tokens is text, but may begin the one that counts.
        ([b"xx"], 3, 100, [b"axx", b"b", b"x", b"x"], ["ax", "xb", "", ""], "stop"),
        # An incomplete character is held back, and replaced at the end.
        ([], 0, 3, [EMOJI[:2], EMOJI[2:] + b"\xc3", b""], ["", "🙂", "\ufffd"], "length"),
        # Invalid UTF-8 is replaced, and the text around it kept.
        ([], 0, 3, [b"ok", b"\xff", b"go"], ["ok", "\ufffd", "go"], "length"),
    ],
)
def test_a_delta_holds_back_what_may_not_be_text(
    stop_words: list[bytes], min_tokens: int, max_tokens: int, tokens: list[bytes | None], deltas: list[str], end: str
) -> None:
    stop_checker = _checker(stop_words, min_tokens, max_tokens)
    assert _add(stop_checker, tokens) == deltas
    assert (stop_checker.text, stop_checker.finish_reason) == ("".join(deltas), end)
    assert stop_checker.num_tokens == len(tokens)


@pytest.mark.parametrize(
    ("stop_words", "tokens", "text", "reason"),
    [
        ([b"cd", b"d"], [(1, b"ab"), (1, b"cd")], "ab", "cd"),  # both end there: the longer one
        ([b"d", "ñ".encode()], [(1, "añ".encode())], "a", "ñ"),
        ([], [(1, b"ab"), (5, b"cd")], "ab", "5"),  # a stop token is no part of the text
        ([b"b"], [(1, b"a"), (5, b"b")], "a", "5"),
        ([], [(1, b"ab"), (END, b"")], "ab", ""),
        ([], [(6, b"ab"), (6, b"cd"), (6, b"ef")], "abcdef", None),
    ],
)
def test_the_stop_reason_is_the_stop_string_or_the_id_of_the_stop_token(
    stop_words: list[bytes], tokens: list[tuple[int, bytes]], text: str, reason: str | None
) -> None:
    # END is a stop token, too: an end token all the same.
    checker = StopChecker(
        min_tokens=0, max_tokens=3, stop_words=stop_words, end_tokens={END}, stop_tokens=frozenset({5, END})
    )
    finished = [checker.add(token, token_bytes) for token, token_bytes in tokens]
    assert finished == [False] * (len(tokens) - 1) + [True]
    assert (checker.text, checker.stop_reason) == (text, reason or "")
    assert checker.finish_reason == ("length" if reason is None else "stop")
    assert checker.next_delta() == text


class _Case(NamedTuple):
    tokens: list[bytes]
    stop_words: list[bytes]
    min_tokens: int
    max_tokens: int
    end_token: bool


def _random_case(randomness: random.Random) -> _Case:
    alphabet = randomness.choice(([b"a", b"b"], [b"a", "é".encode(), EMOJI], [b"a", b"\xff", b"\xc3", b"\x99"]))
    text = b"".join(randomness.choices(alphabet, k=randomness.randint(1, 24)))
    # Cut anywhere, inside characters, too; some tokens have no bytes.
    cuts = sorted(randomness.choices(range(len(text) + 1), k=randomness.randint(0, len(text))))
    tokens = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    words = []
    for _ in range(randomness.randint(0, 3)):
        start = randomness.randrange(len(text))
        inside = text[start : start + randomness.randint(1, 6)].decode(errors="ignore").encode()
        made_up = b"".join(randomness.choices(alphabet[:2], k=randomness.randint(1, 4)))
        words.append(randomness.choice((inside, made_up)))
    min_tokens = randomness.choice((0, 0, randomness.randint(0, len(tokens))))
    max_tokens = max(randomness.choice((len(tokens), randomness.randint(1, len(tokens)))), min_tokens)
    return _Case(tokens, [word for word in words if word], min_tokens, max_tokens, randomness.random() < 0.3)


def _certain_text(text: bytes, stop_words: Sequence[bytes]) -> str:
    """The part of an unfinished text that may be streamed, by definition."""
    held_back = [size for word in stop_words for size in range(1, len(word)) if text.endswith(word[:size])]
    return getincrementaldecoder("utf-8")("replace").decode(text[: len(text) - max(held_back, default=0)])


def _run(case: _Case, deltas_at: random.Random | None) -> tuple[StopChecker, str]:
    """Run a case to its end; return also its deltas, taken after random tokens and at the end."""
    stop_checker, deltas = _checker(case.stop_words, case.min_tokens, case.max_tokens), ""
    for index, token in enumerate(case.tokens):
        last = index == len(case.tokens) - 1
        finished = stop_checker.add(END if last and case.end_token else 1, token)
        if deltas_at is not None and deltas_at.random() < 0.6:
            deltas += stop_checker.next_delta()
            if not finished:
                assert deltas == _certain_text(b"".join(case.tokens[: index + 1]), case.stop_words), case
        if finished:
            break
    deltas += stop_checker.next_delta()
    assert stop_checker.next_delta() == ""
    return stop_checker, deltas


def test_deltas_join_to_the_text() -> None:
    randomness, reasons = random.Random(77), set[str]()
    for _ in range(3000):
        case = _random_case(randomness)
        whole, _ = _run(case, None)
        streamed, deltas = _run(case, randomness)
        assert (streamed.text, streamed.finish_reason) == (whole.text, whole.finish_reason)
        assert deltas == whole.text, case
        reasons.add(whole.finish_reason)
    assert reasons == {"stop", "length"}


def test_an_end_token_that_is_no_special_token_has_no_text() -> None:
    checker = _checker()
    assert checker.add(END, b"<end_of_turn>")
    assert (checker.text, checker.next_delta()) == ("", "")
