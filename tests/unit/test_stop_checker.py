"""When a completion finishes, where its text ends, and its deltas, for every tokenization of the text."""

import random
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
from llama_engine.text.stop_checker import StopChecker

END = 99


def checker(stop_words: Sequence[str | bytes] = (), min_tokens: int = 0, max_tokens: int = 1000) -> StopChecker:
    words = [word.encode() if isinstance(word, str) else word for word in stop_words]
    return StopChecker(min_tokens=min_tokens, max_tokens=max_tokens, stop_words=words, end_tokens={END})


def tokenizations(text: str | bytes) -> Iterator[list[bytes]]:
    """Yield all 2^(n-1) ways to cut n bytes into tokens that are not empty."""
    content = text.encode() if isinstance(text, str) else text
    for count in range(len(content)):
        for cuts in combinations(range(1, len(content)), count):
            yield [content[start:end] for start, end in zip((0, *cuts), (*cuts, len(content)), strict=True)]


def add_until_finished(stop_checker: StopChecker, tokens: Sequence[bytes]) -> str:
    """Add tokens until the completion finishes; return the deltas, joined."""
    deltas = ""
    for token in tokens:
        finished = stop_checker.add(1, token)
        deltas += stop_checker.next_delta()
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
        ("__abcdef", ["ab", "cd"], "__"),
        ("__abcdef", ["abc", "abcd"], "__"),
        ("__abcdef", ["zzz", "f"], "__abcde"),
        ("__abcdef", ["__abcdef"], ""),
        ("__abcdef", ["_"], ""),
    ],
)
def test_the_text_ends_before_the_first_stop_string_in_every_tokenization(
    text: str, stop_words: list[str], expected: str
) -> None:
    for tokens in tokenizations(text):
        stop_checker = checker(stop_words)
        deltas = add_until_finished(stop_checker, tokens)
        assert (stop_checker.text, deltas, stop_checker.finish_reason) == (expected, expected, "stop"), tokens
        # It finished with the token that completed the stop string: without that token there is none.
        before = b"".join(tokens[: stop_checker.num_tokens - 1])
        assert not any(word.encode() in before for word in stop_words), tokens


def test_a_text_without_a_stop_string_does_not_finish() -> None:
    stop_checker = checker(["nothing"])
    add_until_finished(stop_checker, [b"__a", b"bcd", b"efg"])
    assert (stop_checker.text, stop_checker.finish_reason) == ("__abcdefg", "")


@pytest.mark.parametrize(
    ("stop_words", "min_tokens", "max_tokens", "tokens", "expected"),
    [
        (["x"], 3, 100, [b"x", b"ax", b"b", b"x"], ("xaxb", "stop", 4)),  # stop strings before min_tokens do not count
        (["xy"], 2, 100, [b"ax", b"y"], ("a", "stop", 2)),  # one that token min_tokens completes does
        ([], 0, 2, [b"a", b"b"], ("ab", "length", 2)),
        (["b"], 0, 2, [b"a", b"b"], ("a", "stop", 2)),  # a stop string in the last token wins over the length
        ([], 0, 1, [None], ("", "stop", 1)),  # so does an end token
        ([], 0, 100, [b"a", None], ("a", "stop", 2)),
    ],
)
def test_a_completion_finishes_with_its_last_token_and_not_before(
    stop_words: list[str], min_tokens: int, max_tokens: int, tokens: list[bytes | None], expected: tuple[str, str, int]
) -> None:
    """None is the end token."""
    stop_checker = checker(stop_words, min_tokens, max_tokens)
    finished = [stop_checker.add(END if token is None else 1, token or b"") for token in tokens]
    assert finished == [False] * (len(tokens) - 1) + [True]
    assert (stop_checker.text, stop_checker.finish_reason, stop_checker.num_tokens) == expected


@pytest.mark.parametrize("character", ["🙂", "☂️", "e\u0301", "ñ", "한", "\u0000", "𝔘"])
def test_a_character_is_whole_however_it_is_split_over_tokens(character: str) -> None:
    for tokens in tokenizations(f"a{character}"):
        stop_checker = checker()
        assert add_until_finished(stop_checker, tokens) == stop_checker.text == f"a{character}"


@pytest.mark.parametrize("invalid", ["🙂".encode()[:3], b"\xff", "é".encode()[:1]])
def test_invalid_utf8_is_replaced_and_the_text_around_it_kept(invalid: bytes) -> None:
    stop_checker = checker()
    add_until_finished(stop_checker, [b"ok", invalid])
    assert stop_checker.text.rstrip("\ufffd") == "ok"
    stop_checker.add(1, b"go")
    assert stop_checker.text.replace("\ufffd", "") == "okgo"


@dataclass(frozen=True)
class Case:
    tokens: list[bytes]
    stop_words: list[bytes]
    min_tokens: int
    max_tokens: int
    end_token: bool


def random_case(randomness: random.Random) -> Case:
    alphabet = randomness.choice(([b"a", b"b"], [b"a", "é".encode(), "🙂".encode()], [b"a", b"\xff", b"\xc3", b"\x99"]))
    text = b"".join(randomness.choices(alphabet, k=randomness.randint(1, 24)))
    # Cut anywhere, inside characters, too; some tokens have no bytes.
    cuts = sorted(randomness.choices(range(len(text) + 1), k=randomness.randint(0, len(text))))
    tokens = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    words = []
    for _ in range(randomness.randint(0, 3)):
        start = randomness.randrange(len(text))
        inside = text[start : start + randomness.randint(1, 6)].decode(errors="ignore").encode()
        words.append(
            randomness.choice((inside, b"".join(randomness.choices(alphabet[:2], k=randomness.randint(1, 4)))))
        )
    min_tokens = randomness.choice((0, 0, randomness.randint(0, len(tokens))))
    max_tokens = max(randomness.choice((len(tokens), randomness.randint(1, len(tokens)))), min_tokens)
    return Case(tokens, [word for word in words if word], min_tokens, max_tokens, randomness.random() < 0.3)


def certain_text(text: bytes, stop_words: Sequence[bytes]) -> str:
    """The part of an unfinished text that may be streamed, by definition."""
    held_back = [size for word in stop_words for size in range(1, len(word)) if text.endswith(word[:size])]
    return getincrementaldecoder("utf-8")("replace").decode(text[: len(text) - max(held_back, default=0)])


def run(case: Case, deltas_at: random.Random | None) -> tuple[StopChecker, list[str]]:
    """Run a case to its end; take deltas after random tokens, or none."""
    stop_checker = checker(case.stop_words, case.min_tokens, case.max_tokens)
    deltas: list[str] = []
    for index, token in enumerate(case.tokens):
        last = index == len(case.tokens) - 1
        finished = stop_checker.add(END if last and case.end_token else 1, token)
        if deltas_at is not None and deltas_at.random() < 0.6:
            deltas.append(stop_checker.next_delta())
            if not finished:
                assert "".join(deltas) == certain_text(b"".join(case.tokens[: index + 1]), case.stop_words), case
        if finished:
            break
    return stop_checker, deltas


def test_deltas_join_to_the_text_and_never_run_ahead_of_it() -> None:
    randomness, reasons = random.Random(77), set[str]()
    for _ in range(3000):
        case = random_case(randomness)
        whole, _ = run(case, None)
        streamed, deltas = run(case, randomness)
        assert (streamed.text, streamed.finish_reason) == (whole.text, whole.finish_reason)
        reasons.add(whole.finish_reason)
        deltas.append(streamed.next_delta())
        assert "".join(deltas) == whole.text, case
        assert streamed.next_delta() == ""
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(
    ("stop_words", "min_tokens", "max_tokens", "tokens", "deltas"),
    [
        # A partial match is held back until the next token rules it out.
        (["\n\n"], 0, 100, [b"a", b"\n", b"b", b"\n", None], ["a", "", "\nb", "", "\n"]),
        # A stop string before min_tokens is text, but may begin the one that counts.
        (["xx"], 3, 100, [b"axx", b"b", b"x", b"x"], ["ax", "xb", "", ""]),
        # An incomplete character is held back, and replaced at the end.
        ([], 0, 3, ["🙂".encode()[:2], "🙂".encode()[2:] + b"\xc3", b""], ["", "🙂", "\ufffd"]),
    ],
)
def test_a_delta_holds_back_what_may_not_be_text(
    stop_words: list[str], min_tokens: int, max_tokens: int, tokens: list[bytes | None], deltas: list[str]
) -> None:
    stop_checker = checker(stop_words, min_tokens, max_tokens)
    found = []
    for token in tokens:
        stop_checker.add(END if token is None else 1, token or b"")
        found.append(stop_checker.next_delta())
    assert found == deltas
    assert stop_checker.text == "".join(deltas)
