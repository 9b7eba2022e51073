"""The decode loop: prefill into slots, one step per token for all rows, rows leave when they end.

A row's tokens depend on that row alone: its prompt, its parameters, its seed. The engine knows tokens, slots and rows;
text is the codec's, bounds are the request parser's, Triton is nobody's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llama_engine.banning import BannedWords
from llama_engine.cache import SlotCache
from llama_engine.checkpoint import Checkpoint
from llama_engine.defaults import GenerationDefaults
from llama_engine.errors import InvalidSettings, RowFailure
from llama_engine.memory import plan_memory
from llama_engine.requests import GenerationRequest
from llama_engine.sampler import FAILED, Sampler
from llama_engine.settings import Settings
from llama_engine.stopping import Transcript

SPAN_BUCKET = 64
"""Attention reads whole buckets of positions, so that the shapes of a step change rarely."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completion:
    """What a row came to. finish_reason: stop (end token or stop word) or length."""

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


Outcome = Completion | RowFailure

_FAILURE = RowFailure("decoding failed; the server's log has the reason")


@dataclass
class _Row:
    """One request in its slot. index: its place among the requests of the call. length: positions in the cache."""

    index: int
    request: GenerationRequest
    transcript: Transcript
    banned: BannedWords | None
    length: int


class Engine:
    """Decodes batches of requests on one model. Not thread-safe: one call of `complete` at a time."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, slots: int) -> None:
        """Plan the memory and allocate it. Raises OutOfMemoryPlan, with the figures, if it doesn't fit."""
        config, model = checkpoint.config, checkpoint.model
        self._device = checkpoint.facts.device
        self._decoder = model.model
        self._head = model.lm_head
        self._vocabulary = checkpoint.codec.vocabulary
        self._prefill_tokens = settings.prefill_tokens
        self.max_model_len = checkpoint.max_model_len
        self.defaults = GenerationDefaults.of(
            checkpoint.generation_config, settings.default_max_tokens, config.vocab_size
        )
        if slots < 1:
            raise InvalidSettings(f"slots is {slots}; it must be at least 1 (max_batch_size, if it isn't set)")
        self.plan = plan_memory(checkpoint, settings, slots)
        self.plan.check()
        self._cache = SlotCache(self.plan.shape, self._device)
        self._sampler = Sampler(slots, config.vocab_size, sorted(self.defaults.end_tokens), self._device)
        self._tokens = torch.zeros(slots, 1, dtype=torch.long, device=self._device)
        self._positions = torch.zeros(slots, 1, dtype=torch.long, device=self._device)
        self._columns = torch.arange(self.max_model_len, device=self._device)
        self._rows: list[_Row] = []

    @property
    def slots(self) -> int:
        """Rows that can be decoded together."""
        return self.plan.shape.slots

    @torch.inference_mode()
    def complete(self, requests: Sequence[GenerationRequest]) -> list[Outcome]:
        """Run the requests to their ends and return their outcomes in order; one row's failure is that row's alone."""
        outcomes: dict[int, Outcome] = {}
        waiting = deque(enumerate(requests))
        while waiting or self._rows:
            try:
                outcomes.update(self._prefill(self._next_group(waiting)) if self._can_admit(waiting) else self._step())
            except Exception:  # noqa: BLE001 - whatever failed, every row in the computation must get an answer
                _log.exception("a forward pass over %d rows failed; they are answered with an error", len(self._rows))
                outcomes.update(self._abandon())
        return [outcomes.get(index, _FAILURE) for index in range(len(requests))]

    def prove(self) -> None:
        """Generate through prefill and a decode step; raises RowFailure if that doesn't work.

        On a GPU with the longest prompt there can be, so that the plan's reserve is tried and not only computed; on a
        CPU, where that could take minutes, with one token.
        """
        width = max(self.max_model_len - 2, 1) if self._device.type == "cuda" else 1
        # Two tokens are one step after the prefill; a context of two tokens has room for one.
        count = min(2, self.max_model_len - width)
        request = GenerationRequest(prompt="", prompt_tokens=(0,) * width, max_tokens=count, min_tokens=count)
        outcome = self.complete([request])[0]
        if isinstance(outcome, RowFailure):
            raise outcome

    def _can_admit(self, waiting: deque[tuple[int, GenerationRequest]]) -> bool:
        return bool(waiting) and len(self._rows) < self.slots

    def _next_group(self, waiting: deque[tuple[int, GenerationRequest]]) -> list[_Row]:
        """Take the requests that are prefilled together next: while there are slots and the padded prompts fit."""
        group: list[_Row] = []
        width = 0
        while waiting and len(self._rows) + len(group) < self.slots:
            index, request = waiting[0]
            width = max(width, len(request.prompt_tokens))
            if group and width * (len(group) + 1) > self._prefill_tokens:
                break
            waiting.popleft()
            group.append(self._row(index, request))
        return group

    def _row(self, index: int, request: GenerationRequest) -> _Row:
        transcript = Transcript(
            min_tokens=request.min_tokens,
            max_tokens=request.max_tokens,
            stop_words=request.stop_words,
            end_tokens=self.defaults.end_tokens,
        )
        banned = BannedWords(request.bad_words, self._vocabulary, self._device) if request.bad_words else None
        return _Row(index, request, transcript, banned, len(request.prompt_tokens))

    def _prefill(self, group: list[_Row]) -> dict[int, Outcome]:
        """Run the prompts of a group through the model in one pass and draw their first tokens.

        Prompts are padded on the right: a prompt token sees only what is left of it, so what a row computes for its
        padding reaches nobody, and what it writes to the cache there is overwritten before it can be seen.
        """
        first, count = len(self._rows), len(group)
        self._rows += group
        self._sampler.admit([row.request for row in group])
        width = max(row.length for row in group)
        tokens = torch.empty(count, width, dtype=torch.long)
        for index, row in enumerate(group):
            tokens[index, : row.length] = torch.tensor(row.request.prompt_tokens)
            # Padding is the row's own last token: a foreign one might overflow where the row's don't, and a NaN in the
            # cache is not hidden by a mask.
            tokens[index, row.length :] = row.request.prompt_tokens[-1]
        lengths = torch.tensor([row.length for row in group], device=self._device)
        self._positions[first : first + count, 0] = lengths
        positions = self._columns[:width].expand(count, width)
        # No mask: with nothing before it and the padding behind it, a prefill is plainly causal, which SDPA knows how
        # to do without the width x width booleans a row that a mask would take.
        hidden = self._forward(first, tokens.to(self._device), positions, width, mask=None)
        last = hidden[torch.arange(count, device=self._device), lengths - 1]
        return self._draw(first, self._head(last))

    def _step(self) -> dict[int, Outcome]:
        """Run one token of every row through the model and draw the next."""
        count = len(self._rows)
        positions = self._positions[:count]
        longest = max(row.length for row in self._rows) + 1
        span = min(-(-longest // SPAN_BUCKET) * SPAN_BUCKET, self.max_model_len)
        # [rows, 1, 1, span]: a token sees its own position and everything before it.
        mask = (self._columns[:span] <= positions)[:, None, None]
        hidden = self._forward(0, self._tokens[:count], positions, span, mask)
        positions += 1
        for row in self._rows:
            row.length += 1
        return self._draw(0, self._head(hidden[:, -1]))

    def _forward(
        self, first: int, tokens: torch.Tensor, positions: torch.Tensor, span: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Run [rows, width] tokens at their positions in slots `first` …; return [rows, width, hidden].

        mask: [rows, 1, width, span], True where a token may look; None is causal over the pass itself.
        """
        self._cache.aim(first, positions, span)
        hidden: torch.Tensor = self._decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        return hidden

    def _draw(self, first: int, logits: torch.Tensor) -> dict[int, Outcome]:
        """Choose the next token of the slots `first` …, and retire the rows that end with it."""
        rows = self._rows[first:]
        steps = [row.transcript.num_tokens for row in rows]
        banned = [row.banned for row in rows]
        tokens = self._sampler.sample(logits, first, steps, banned)
        self._tokens[first : first + len(rows), 0] = tokens
        outcomes: dict[int, Outcome] = {}
        # The host has to know the tokens: here it waits for the device.
        chosen = tokens.tolist()
        # Backwards, so that the row that moves into a freed slot is one that has been looked at already.
        for slot in range(first + len(rows) - 1, first - 1, -1):
            row, token = self._rows[slot], chosen[slot - first]
            if token == FAILED:
                outcomes[row.index] = RowFailure("the model's logits for this request were not finite")
                self._cache.wipe(slot)
                self._retire(slot)
            elif row.transcript.add(token, self._vocabulary.pieces[token]):
                outcomes[row.index] = _completion(row)
                self._retire(slot)
            elif row.banned is not None:
                row.banned.advance(self._vocabulary.pieces[token])
        return outcomes

    def _retire(self, slot: int) -> None:
        """Give a slot up: the last row moves into it, so that the rows in use stay the first ones."""
        last = self._rows.pop()
        self._sampler.retire(slot)
        if slot == len(self._rows):
            return
        self._rows[slot] = last
        self._cache.move(len(self._rows), slot, last.length)
        self._tokens[slot] = self._tokens[len(self._rows)]
        self._positions[slot] = self._positions[len(self._rows)]

    def _abandon(self) -> dict[int, Outcome]:
        """Answer every row with a failure and clear its slot."""
        rows, self._rows = self._rows, []
        self._sampler.clear()
        for slot in range(len(rows)):
            self._cache.wipe(slot)
        return {row.index: _FAILURE for row in rows}


def _completion(row: _Row) -> Completion:
    request, transcript = row.request, row.transcript
    return Completion(
        text=transcript.text if request.exclude_input_in_output else request.prompt + transcript.text,
        finish_reason=transcript.finish_reason,
        num_input_tokens=len(request.prompt_tokens),
        num_output_tokens=transcript.num_tokens,
    )
