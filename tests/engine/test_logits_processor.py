"""The bias and the masks of one row: what they leave, in which order, and beside a guide."""

import numpy as np
import pytest
import torch
from llama_engine.errors import InvalidRequest
from llama_engine.grammar.matcher import GuideState
from llama_engine.sampling.logits_processor import BadWords, LogitsProcessor, forbidden
from llama_engine.text.tokenizer import Vocabulary
from numpy.typing import NDArray

CPU = torch.device("cpu")
SIZE, END = 40, 3
LETTERS = Vocabulary([bytes([ord("a") + token % 26]) * (1 + token // 26) for token in range(SIZE)])


class _Alternating(GuideState):
    """A guide that allows even tokens first, then odd ones, and so on."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.accepted) > 2

    @property
    def may_end(self) -> bool:
        return len(self.accepted) == 2

    def fill(self, allowed: NDArray[np.int32]) -> None:
        if len(self.accepted) > 2:
            raise InvalidRequest("guided_decoding_guide can't be followed")
        allowed.fill(0)
        for token in range(len(self.accepted) % 2, SIZE, 2):
            # Bit 31 is the sign.
            allowed.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> bool:
        conforms = token % 2 == len(self.accepted) % 2
        self.accepted.append(token)
        return conforms


def _guided(processor: LogitsProcessor, guide: GuideState) -> LogitsProcessor:
    processor.follow_guide(guide)
    return processor


def _left(processor: LogitsProcessor, too_early: bool = False) -> set[int]:
    """Return the tokens that masks leave."""
    logits = torch.zeros(SIZE)
    if processor.is_guided:
        allowed = torch.zeros(1, 2, dtype=torch.int32)
        processor.fill(allowed[0].numpy())
        logits.masked_fill_(forbidden(allowed, SIZE)[0], -torch.inf)
    processor.mask(logits, too_early)
    assert processor.leaves_nothing(too_early) == (not logits.isfinite().any())
    return set(logits.isfinite().nonzero()[:, 0].tolist())


def test_a_row_that_has_no_end_has_no_token_left() -> None:
    assert _left(LogitsProcessor(SIZE, CPU, allowed=[2], bad_words=BadWords([b"c"], LETTERS, CPU))) == set()


def test_a_guide_masks_what_it_rules_out_beside_all_other_masks() -> None:
    guide = _Alternating()
    bad_words = BadWords([b"ab"], LETTERS, CPU)
    processor = _guided(LogitsProcessor(SIZE, CPU, allowed=[0, 1, 2, END, 33], ends=[END], bad_words=bad_words), guide)
    assert _left(processor) == {0, 2}
    assert processor.append(0, b"a")
    # 1, a "b", would complete the bad word.
    assert _left(processor) == {END, 33}
    assert not processor.append(2, b"c")
    assert guide.accepted == [0, 2]
    # The text may end here, but not before min_tokens.
    assert _left(processor) == {0, 2, END}
    assert _left(processor, too_early=True) == {0, 2}
    assert processor.problem is None
    processor.append(2, b"c")
    assert _left(processor) == set()
    assert str(processor.problem) == "guided_decoding_guide can't be followed"


@pytest.mark.parametrize(
    ("options", "at_first", "at_its_end", "too_early"),
    [
        # Without a token left, a text ends only where its guide lets it.
        ({"allowed": [1], "ends": [END]}, set(), {END}, {END}),
        # Stop tokens come only where the text may end.
        ({"allowed": [2, 4, 5, END], "ends": [END, 4, 5], "stops": [4, 5]}, {2}, {2, 4, 5, END}, {2}),
        # An ignored end token is an ordinary one, which the guide itself asks for.
        ({"allowed": [0, 2, 5], "ends": [5], "ignored": [2]}, {0, 2}, {0, 5}, {0}),
    ],
    ids=["end tokens", "stop tokens", "ignored end tokens"],
)
def test_tokens_that_end_a_text_come_only_where_its_guide_may_end(
    options: dict[str, list[int]], at_first: set[int], at_its_end: set[int], too_early: set[int]
) -> None:
    processor = _guided(LogitsProcessor(SIZE, CPU, **options), _Alternating())  # type: ignore[arg-type]
    assert _left(processor) == _left(processor, too_early=True) == at_first
    processor.append(0, b"a")
    processor.append(1, b"b")
    assert _left(processor) == at_its_end
    assert _left(processor, too_early=True) == too_early


def test_a_row_is_complete_when_its_guide_is_finished() -> None:
    processor = _guided(LogitsProcessor(SIZE, CPU), _Alternating())
    assert not processor.is_complete
    for token in range(3):
        processor.append(token, b"a")
    assert processor.is_complete
    assert not LogitsProcessor(SIZE, CPU).is_complete
