"""When a text ends and what of it counts: stop words however tokens split them, limits, end tokens."""

import random
from collections.abc import Sequence

import pytest
from engine.engines import completions, engine_of
from engine.prompts import random_prompt
from engine.splitting import splits
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.loader import Checkpoint
from llama_engine.text.stop_checker import StopChecker

END = 99


def _transcript(stop_words: Sequence[str] = (), min_tokens: int = 0, max_tokens: int = 100) -> StopChecker:
    return StopChecker(
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop_words=[word.encode() for word in stop_words],
        end_tokens=frozenset({END}),
    )


def _feed(transcript: StopChecker, pieces: Sequence[bytes]) -> int:
    """Add pieces until the row ends; return how many were taken."""
    for count, piece in enumerate(pieces, 1):
        if transcript.add(1, piece):
            return count
    return len(pieces)


def test_a_stop_word_split_over_tokens_is_missed_or_left_in_the_text() -> None:
    for pieces in splits(b"a STOP. bc"):
        transcript = _transcript([" STOP."])
        taken = _feed(transcript, pieces)
        assert (transcript.text, transcript.finish_reason) == ("a", "stop"), pieces
        assert len(b"".join(pieces[: taken - 1])) < len("a STOP."), "the row went on after its stop word"


def test_which_of_overlapping_stop_words_counts_depends_on_the_tokens() -> None:
    for pieces in splits(b"xabcd"):
        transcript = _transcript(["abc", "b"])
        _feed(transcript, pieces)
        assert (transcript.text, transcript.finish_reason) == ("xa", "stop"), pieces


def test_a_stop_word_of_several_bytes_a_character_is_missed() -> None:
    for pieces in splits("é🙂ñé".encode()):
        transcript = _transcript(["🙂ñ"])
        _feed(transcript, pieces)
        assert (transcript.text, transcript.finish_reason) == ("é", "stop"), pieces


@pytest.mark.parametrize(
    ("stop_words", "text"),
    [
        (["cd", "ab"], "__"),  # the earlier one, whatever the order
        (["ab", "cd"], "__"),
        (["abc", "abcd"], "__"),  # both at one place
        (["zzz", "f"], "__abcde"),  # one of them never comes
        (["__abcdefg"], ""),  # the whole text
        (["_"], ""),  # at once
        (["nothing"], "__abcdefg"),
    ],
)
def test_the_text_does_not_end_before_the_first_of_several(stop_words: list[str], text: str) -> None:
    for pieces in ([bytes([byte]) for byte in b"__abcdefg"], [b"__abcdefg"], [b"__a", b"bcd", b"efg"]):
        transcript = _transcript(stop_words)
        _feed(transcript, pieces)
        assert transcript.text == text
        assert transcript.finish_reason == ("" if text == "__abcdefg" else "stop")


def test_a_false_start_hides_the_stop_word() -> None:
    for pieces in splits(b"aabaabaac"):
        transcript = _transcript(["aabaac"])
        _feed(transcript, pieces)
        assert (transcript.text, transcript.finish_reason) == ("aab", "stop"), pieces


def test_a_stop_word_counts_before_min_tokens() -> None:
    transcript = _transcript(["x"], min_tokens=3)
    assert [transcript.add(1, piece) for piece in (b"x", b"ax", b"b", b"x")] == [False, False, False, True]
    assert (transcript.text, transcript.num_tokens) == ("xaxb", 4)


def test_a_stop_word_that_ends_with_token_min_tokens_is_missed() -> None:
    transcript = _transcript(["xy"], min_tokens=2)
    assert [transcript.add(1, piece) for piece in (b"ax", b"y")] == [False, True]
    assert (transcript.text, transcript.finish_reason) == ("a", "stop")


def test_the_length_limit_is_off_by_one_or_beats_a_stop() -> None:
    transcript = _transcript(max_tokens=2)
    assert [transcript.add(1, b"a"), transcript.add(1, b"b")] == [False, True]
    assert (transcript.text, transcript.finish_reason, transcript.num_tokens) == ("ab", "length", 2)
    transcript = _transcript(["b"], max_tokens=2)
    assert [transcript.add(1, b"a"), transcript.add(1, b"b")] == [False, True]
    assert (transcript.text, transcript.finish_reason) == ("a", "stop")
    transcript = _transcript(max_tokens=1)
    assert transcript.add(END, b"")
    assert (transcript.text, transcript.finish_reason, transcript.num_tokens) == ("", "stop", 1)


def test_an_end_token_does_not_end_the_row() -> None:
    transcript = _transcript()
    assert [transcript.add(1, b"a"), transcript.add(END, b"")] == [False, True]
    assert (transcript.text, transcript.finish_reason, transcript.num_tokens) == ("a", "stop", 2)


def test_generation_runs_past_a_stop_word_or_changes_by_it(fp32: Checkpoint) -> None:
    """Any part of a greedy text, given as a stop word, ends that text exactly before it."""
    randomness = random.Random(12)
    engine = engine_of(fp32)
    prompts = [random_prompt(fp32.tokenizer, range(3, 30), randomness)[1] for _ in range(8)]
    plain = [GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=24) for prompt in prompts]
    full = completions(engine, plain)
    stopped, words = [], []
    for prompt, completion in zip(prompts, full, strict=True):
        start = randomness.randrange(len(completion.text))
        word = completion.text[start : start + randomness.randint(1, 9)]
        words.append(word)
        stopped.append(
            GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=24, stop_words=(b"\x00never", word.encode()))
        )
    for word, completion, cut in zip(words, full, completions(engine, stopped), strict=True):
        assert cut.text == completion.text[: completion.text.find(word)]
        assert cut.finish_reason == "stop"
        assert cut.num_output_tokens <= completion.num_output_tokens
