"""Drafts: guesses of a sequence's next tokens, which a decode step verifies in one pass.

A guess is what the guide forces, or what followed the sequence's last tokens where they stood before: in the text that
the client predicted, in its prompt and output, or in a sequence of the same `cache_salt` and adapter that finished
lately. A wrong guess costs time and changes no token: each position gets the token that it would have had without the
draft.

How many guessed tokens a step takes follows from the sequences' shares of accepted tokens so far and from the time of a
step by the number of its tokens (`DraftBudget`).

Sources: prompt lookup decoding (vLLM's n-gram speculator), SuffixDecoding (arXiv:2411.04975).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice
from operator import itemgetter, mul
from typing import TYPE_CHECKING

import torch

from llama_engine.engine.draft_budget import DraftBudget
from llama_engine.engine.draft_matches import MAX_MATCH, MIN_MATCH, FinishedIndexes, NgramIndex
from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.model.model_runner import ModelRunner, TokenChunk

if TYPE_CHECKING:
    from llama_engine.engine.page_manager import PageManager
    from llama_engine.text.tokenizer import Tokenizer

MAX_DRAFT = 24
"""Maximum tokens of a draft."""

GAIN = 1.03
"""Drafts are verified if they promise this many times the tokens per second."""

_FIRST_GUESS, _KEPT = 8.0, 0.97
"""Weight of the first estimate of a probability, in tokens, and what a count keeps with each further draft."""


class Acceptance:
    """The probabilities that a guessed token is right, by what it rests on, from those that were.

    A guide has one probability; a match has one for each power of two of its length, which grows with each right token.
    """

    def __init__(self, others: Acceptance | None = None) -> None:
        """others: what sequences had before. A tenth of the guess without them stays, so that any source is tried."""
        lengths = (MIN_MATCH << power for power in range((MAX_MATCH // MIN_MATCH).bit_length()))
        shares = [0.7, *(1 - 1 / length for length in lengths)]
        if others is not None:
            shares = [0.1 * first + 0.9 * share for first, share in zip(shares, others.shares, strict=True)]
        # The decaying counts of right and of all verified tokens, for a guide and for each length.
        self._right = [_FIRST_GUESS * share for share in shares]
        self._all = [_FIRST_GUESS] * len(self._right)

    @property
    def shares(self) -> list[float]:
        """The probabilities for a guide's text and for each length."""
        return [right / verified for right, verified in zip(self._right, self._all, strict=True)]

    def probabilities(self, length: int, count: int) -> list[float]:
        """Return the probabilities of `count` tokens one after the other. length: of the match; 0 is a guide's text."""
        shares = self.shares
        return list(accumulate((shares[_class(length, place)] for place in range(count)), mul))

    def record(self, length: int, verified: int, right: int) -> None:
        """Count the verified tokens of a draft, of which the first were right."""
        for place in range(verified):
            index = _class(length, place)
            self._right[index] = _KEPT * self._right[index] + (place < right)
            self._all[index] = _KEPT * self._all[index] + 1


def _class(length: int, place: int) -> int:
    return length and (min(length + place, MAX_MATCH) // MIN_MATCH).bit_length()


@dataclass
class Drafting:
    """What drafts of one sequence are made of.

    index: the prompt's last tokens and the prediction, if there is one, then prompt and output. predicted: number of
    the former. acceptance: that of its drafts.
    """

    index: NgramIndex
    predicted: int
    acceptance: Acceptance


@dataclass
class Draft:
    """Guessed tokens of a sequence.

    source: guide, prediction, text (prompt and output) or finished (sequence). length: of the match; 0 is a guide's
    text. logits: those after each token, [tokens, vocabulary], once they are computed. accepted: how many tokens were
    right so far.
    """

    tokens: list[int]
    source: str
    length: int = 0
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    accepted: int = 0

    def goes_on(self, sequence: Sequence) -> bool:
        """Return whether the sequence goes on, and its last token is the next guessed one."""
        return sequence.status is Status.DECODE and self._has_last_of(sequence)

    def ended(self, sequence: Sequence) -> bool:
        """Return whether the sequence is complete, and its last token is the next guessed one."""
        return isinstance(sequence.result, Completion) and self._has_last_of(sequence)

    def _has_last_of(self, sequence: Sequence) -> bool:
        return sequence.output_tokens[-1:] == self.tokens[self.accepted : self.accepted + 1]


class Drafter:
    """Makes the drafts of each step. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, pages: PageManager, limit: int, shares_prefixes: bool) -> None:
        """limit: maximum tokens of a step. shares_prefixes: whether sequences of one salt see each other's tokens."""
        self.limit = limit
        self._tokenizer, self._pages, self._budget = tokenizer, pages, DraftBudget(limit)
        self._finished = FinishedIndexes() if shares_prefixes else None
        # It counts the drafts of all sequences.
        self._acceptance = Acceptance()

    def guess(self, sequences: list[Sequence], room: int) -> dict[Sequence, Draft]:
        """Return the likeliest drafts of decoding sequences, none if no draft would pay. room: for tokens of each."""
        if room <= 0 or not self._budget.best_count(len(sequences), [1.0] * room, GAIN):
            return {}
        return {sequence: guess for sequence in sequences if (guess := self._guess(sequence, room)) is not None}

    def choose(self, guesses: Mapping[Sequence, Draft], decoding: int, room: int) -> dict[Sequence, Draft]:
        """Return the beginnings of drafts that pay together, with pages for their tokens.

        Shortens the guesses themselves, and gives sequences the pages; `record` takes back those of wrong ones.

        decoding: number of sequences of the step. room: for tokens of all drafts.
        """
        # The probabilities of a draft's tokens fall, so that the best ones of all drafts are the beginnings of drafts.
        likeliest = sorted(
            (
                (probability, sequence)
                for sequence, guess in guesses.items()
                for probability in _acceptance(sequence).probabilities(guess.length, len(guess.tokens))
            ),
            key=itemgetter(0),
            reverse=True,
        )[:room]
        count = self._budget.best_count(decoding, [probability for probability, _ in likeliest], GAIN)
        drafts: dict[Sequence, Draft] = {}
        for sequence, length in Counter(sequence for _, sequence in likeliest[:count]).items():
            guess = guesses[sequence]
            del guess.tokens[self._pages.extend_for_draft(sequence, length) :]
            if guess.tokens:
                drafts[sequence] = guess
        return drafts

    def measure(self, model: ModelRunner, sequence: Sequence) -> None:
        """Measure the times of steps. Before, no draft pays. sequence: one of `limit` prompt tokens, in no engine."""
        if not self._pages.allocate(sequence, 0):
            return

        def step(tokens: int) -> None:
            assert sequence.kv_slot is not None
            hidden = model.run_chunks([TokenChunk(sequence.kv_slot, 0, [0] * tokens)], every=True)
            # Reading a value waits for the device.
            model.logits(hidden)[0, 0].item()

        with torch.inference_mode():
            self._budget.measure(step)
        self._pages.release(sequence)
        model.take_term_counts()

    def record(self, drafts: Mapping[Sequence, Draft], decoding: int, seconds: float) -> None:
        """Take back the pages of wrong guesses of a step, and count the right ones.

        decoding: number of sequences. seconds: the step's time; NaN if it had other work, too.
        """
        self._budget.record(decoding + sum(len(draft.tokens) for draft in drafts.values()), seconds, bool(drafts))
        for sequence, draft in drafts.items():
            draft.logits = torch.empty(0)
            self._pages.trim(sequence)
            if draft.ended(sequence):
                draft.accepted += 1
            verified = min(draft.accepted + 1, len(draft.tokens))
            for acceptance in (self._acceptance, _acceptance(sequence)):
                acceptance.record(draft.length, verified, draft.accepted)
            sequence.num_accepted_draft_tokens += draft.accepted
            sequence.num_rejected_draft_tokens += len(draft.tokens) - draft.accepted

    def add_finished(self, sequence: Sequence) -> None:
        """Keep the tokens of a completion for later sequences of its salt and adapter."""
        if self._finished is not None and isinstance(sequence.result, Completion):
            self._finished.add(sequence.request.prefix_root, self._updated(sequence).index)

    def _guess(self, sequence: Sequence, room: int) -> Draft | None:
        """Return the likeliest next tokens of a sequence, None if there is no guess."""
        if sequence.status is not Status.DECODE:
            return None
        # The last token of the text needs no draft: it follows from the position before.
        room = min(room, MAX_DRAFT, sequence.request.max_tokens - sequence.num_output_tokens - 1)
        if room <= 0:
            return None
        guess = self._match(sequence, room)
        forced = self._forced(sequence)
        if forced and (guess is None or guess.tokens[:1] != forced[:1]):
            # The guide's text is sure, but the model may split it into other tokens than the tokenizer does.
            return Draft(forced[:room], "guide")
        return guess

    def _match(self, sequence: Sequence, room: int) -> Draft | None:
        """Return what followed the longest match of the sequence's last tokens; None without a match."""
        drafting = self._updated(sequence)
        recent = drafting.index.tokens
        if len(recent) < MIN_MATCH:
            return None
        position, length = drafting.index.find(recent)
        if position and position < drafting.predicted:
            end = min(position + room, drafting.predicted)
            return Draft(recent[position:end], "prediction", length)
        if position:
            # A text that repeats itself goes on doing so.
            return Draft([*islice(cycle(recent[position:]), room)], "text", length)
        if self._finished is not None:
            for index in self._finished.get(sequence.request.prefix_root):
                position, length = index.find(recent)
                if position:
                    return Draft(index.tokens[position : position + room], "finished", length)
        return None

    def _forced(self, sequence: Sequence) -> list[int]:
        """Return the tokens that the guide forces, without the last one, which may become a part of a longer one."""
        processor = sequence.processor
        text = "" if processor is None else processor.forced_text()
        return list(self._tokenizer.encode_inside(text)[:-1]) if text else []

    def _updated(self, sequence: Sequence) -> Drafting:
        """Return the sequence's drafting, with all of its tokens."""
        if sequence.drafting is None:
            request = sequence.request
            predicted = request.prediction_tokens and (*request.prompt_tokens[-MIN_MATCH:], *request.prediction_tokens)
            sequence.drafting = Drafting(NgramIndex(predicted), len(predicted), Acceptance(self._acceptance))
        drafting = sequence.drafting
        tokens = drafting.index.tokens
        tokens += sequence.tokens(len(tokens) - drafting.predicted, sequence.num_tokens)
        return drafting


def _acceptance(sequence: Sequence) -> Acceptance:
    """Return the acceptance of a sequence that has a draft."""
    assert sequence.drafting is not None, "the sequence has had no draft"
    return sequence.drafting.acceptance
