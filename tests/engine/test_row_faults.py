"""What belongs to one row fails: its bad words, its text. The other rows, and their counts, stay as they were."""

import pytest
import torch
from engine.engines import completions, engine_of
from engine.faulty import only_fails, penalized
from engine.stepping import run_rows
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint
from llama_engine.text.bad_words import BadWords
from llama_engine.text.stop_checker import StopChecker
from llama_engine.text.vocabulary import Vocabulary


@pytest.fixture
def engine(fp32: Checkpoint) -> Engine:
    return engine_of(fp32, 4)


class _Broken(BadWords):
    """Bad words that fail so many times, in the sampler or when they are told of a token."""

    def __init__(self, vocabulary: Vocabulary, where: str, times: int) -> None:
        super().__init__([b"\x00never"], vocabulary, torch.device("cpu"))
        self._where = where
        self._times = times

    def completing(self) -> torch.Tensor:
        self._fail("completing")
        return super().completing()

    def append(self, token_bytes: bytes) -> None:
        self._fail("append")
        super().append(token_bytes)

    def _fail(self, where: str) -> None:
        if where == self._where and self._times:
            self._times -= 1
            raise RuntimeError(f"no {where}")


@pytest.mark.parametrize("place", [0, 3])
def test_a_sampler_that_fails_once_counts_a_token_twice(fp32: Checkpoint, engine: Engine, place: int) -> None:
    requests = penalized(fp32, 4)
    expected = completions(engine, requests)
    rows = [engine.sequence(request) for request in requests]
    rows[place].banned = _Broken(fp32.tokenizer.vocabulary, "completing", times=2)
    run = run_rows(engine, rows)
    assert run.results == expected
    assert run.errors == 2


@pytest.mark.parametrize("where", ["completing", "append"])
def test_bad_words_that_fail_take_other_rows_down(fp32: Checkpoint, engine: Engine, where: str) -> None:
    requests = penalized(fp32, 4)
    expected = completions(engine, requests)
    rows = [engine.sequence(request) for request in requests]
    rows[1].banned = _Broken(fp32.tokenizer.vocabulary, where, times=100)
    only_fails(run_rows(engine, rows), 1, expected)
    assert engine.generate(requests) == expected


class _BrokenTranscript(StopChecker):
    def add(self, token: int, piece: bytes) -> bool:
        if self.num_tokens == 3:
            raise RuntimeError("no text")
        return super().add(token, piece)


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_text_that_fails_takes_other_rows_down(fp32: Checkpoint, engine: Engine, place: int) -> None:
    requests = penalized(fp32, 4)
    expected = completions(engine, requests)
    rows = [engine.sequence(request) for request in requests]
    rows[place].stop_checker = _BrokenTranscript(min_tokens=8, max_tokens=8, stop_words=[], end_tokens=[])
    only_fails(run_rows(engine, rows), place, expected)
    assert engine.generate(requests) == expected
