"""A text taken in pieces: joined they are the text, no piece is taken back, and nothing certain is kept."""

import random
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from engine.splitting import splits
from llama_engine.text.stop_checker import StopChecker

END = 99


def _transcript(stop_words: Sequence[bytes] = (), min_tokens: int = 0, max_tokens: int = 1000) -> StopChecker:
    return StopChecker(min_tokens=min_tokens, max_tokens=max_tokens, stop_words=stop_words, end_tokens=frozenset({END}))


def _certain(text: bytes, stop_words: Sequence[bytes]) -> str:
    """What may be shown of a text that goes on, by definition."""
    held = [size for word in stop_words for size in range(1, len(word)) if text.endswith(word[:size])]
    return getincrementaldecoder("utf-8")("replace").decode(text[: len(text) - max(held, default=0)])


@dataclass
class _Case:
    tokens: list[bytes]
    stop_words: list[bytes]
    min_tokens: int
    max_tokens: int
    ended_by_token: bool


def _random_case(randomness: random.Random) -> _Case:
    alphabet = randomness.choice(([b"a", b"b"], [b"a", "é".encode(), "🙂".encode()], [b"a", b"\xff", b"\xc3", b"\x99"]))
    text = b"".join(randomness.choices(alphabet, k=randomness.randint(1, 24)))
    # Cut anywhere, in the middle of characters too; and some tokens have no bytes.
    cuts = sorted(randomness.choices(range(len(text) + 1), k=randomness.randint(0, len(text))))
    tokens = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    words = []
    for _ in range(randomness.randint(0, 3)):
        if randomness.random() < 0.5:
            start = randomness.randrange(len(text))
            word = text[start : start + randomness.randint(1, 6)].decode(errors="ignore").encode()
        else:
            word = b"".join(randomness.choices(alphabet[:2], k=randomness.randint(1, 4)))
        words += [word] if word else []
    min_tokens = randomness.choice((0, 0, randomness.randint(0, len(tokens))))
    max_tokens = max(randomness.choice((len(tokens), randomness.randint(1, len(tokens)))), min_tokens)
    return _Case(tokens, words, min_tokens, max_tokens, randomness.random() < 0.3)


def _feed(case: _Case, takes: random.Random | None) -> tuple[StopChecker, list[str]]:
    """Run a case to its end; take at random times, or (None) never before the end."""
    transcript = _transcript(case.stop_words, case.min_tokens, case.max_tokens)
    pieces: list[str] = []
    for index, token in enumerate(case.tokens):
        last = index == len(case.tokens) - 1
        ended = transcript.add(END if last and case.ended_by_token else 1, token)
        if takes is not None and takes.random() < 0.6:
            pieces.append(transcript.next_delta())
            if not ended:
                assert "".join(pieces) == _certain(b"".join(case.tokens[: index + 1]), case.stop_words), case
        if ended:
            break
    return transcript, pieces


def test_pieces_joined_are_another_text() -> None:
    randomness, reasons = random.Random(77), set[str]()
    for _ in range(6000):
        case = _random_case(randomness)
        whole, _ = _feed(case, None)
        transcript, pieces = _feed(case, randomness)
        assert (transcript.text, transcript.finish_reason) == (whole.text, whole.finish_reason)
        reasons.add(whole.finish_reason)
        pieces.append(transcript.next_delta())
        assert "".join(pieces) == whole.text, case
        assert transcript.next_delta() == ""
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(
    ("text", "stop_words"),
    [
        ("a STOP", [" STOP"]),
        ("aabaabaac", ["aabaac"]),
        ("xabcd", ["abcx", "bcd"]),  # the word that is given up holds the one that counts
        ("é🙂ñ.", ["🙂ñ"]),
        ("éé\u00ea", ["\u00ea"]),  # begins with the same byte as its neighbours
        ("aaaa", ["aaa"]),
    ],
)
def test_the_beginning_of_a_stop_word_is_shown(text: str, stop_words: list[str]) -> None:
    words = [word.encode() for word in stop_words]
    final = text[: min(text.find(word) for word in stop_words if word in text)]
    for tokens in splits(text.encode()):
        transcript, shown = _transcript(words), ""
        for token in tokens:
            ended = transcript.add(1, token)
            shown += transcript.next_delta()
            assert final.startswith(shown), tokens
            if ended:
                break
        assert (shown, transcript.finish_reason) == (final, "stop"), tokens


def test_a_stop_word_that_never_comes_is_kept_back() -> None:
    transcript = _transcript([b"\n\n"])
    shown = []
    for token in (b"a", b"\n", b"b", b"\n"):
        transcript.add(1, token)
        shown.append(transcript.next_delta())
    transcript.add(END, b"")
    assert [*shown, transcript.next_delta()] == ["a", "", "\nb", "", "\n"]


def test_a_stop_word_before_min_tokens_is_kept_back_or_its_end_is_shown() -> None:
    transcript = _transcript([b"xx"], min_tokens=3)
    shown = []
    for token in (b"axx", b"b", b"x", b"x"):
        transcript.add(1, token)
        shown.append(transcript.next_delta())
    assert shown == ["ax", "xb", "", ""]
    assert (transcript.text, transcript.finish_reason) == ("axxb", "stop")


def test_half_a_character_is_shown_or_lost_at_the_end() -> None:
    transcript = _transcript(max_tokens=3)
    shown = []
    for token in ("🙂".encode()[:2], "🙂".encode()[2:] + b"\xc3", b""):
        transcript.add(1, token)
        shown.append(transcript.next_delta())
    assert shown == ["", "🙂", "�"]
    assert transcript.text == "".join(shown)
