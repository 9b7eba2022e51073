"""Samples the next token of every row, each with its own parameters.

The formulas (temperature, min-p, top-k, top-p, penalties) are in `filters`; `cpu_sampling` has all but the
penalties again, for CPUs. Penalties, sorting and noise are skipped if no sequence of the batch uses them. A row's token
never depends on the features that other rows use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from llama_engine.errors import GenerationError, InvalidRequest, RequestError
from llama_engine.sampling.cpu_sampling import draw_on_cpu
from llama_engine.sampling.filters import (
    apply_temperature,
    draw,
    forbidden,
    keep_min_p,
    keep_top_k_top_p,
    penalize_output,
    penalize_repetition,
)
from llama_engine.sampling.log_probs import log_probs_of
from llama_engine.sampling.logits_processor import RowProcessor
from llama_engine.sampling.philox import step_keys
from llama_engine.sampling.state import SamplingFeatures, SamplingState
from llama_engine.transfer import to_device

if TYPE_CHECKING:
    from llama_engine.engine.sequence import Sequence

FAILED = -1
"""Token of a row whose logits are not finite."""

_PerRow = list[tuple[int, RowProcessor]]
"""Row numbers and processors of the sequences that have a `RowProcessor`."""


class Sampler:
    """Samples tokens from logits. Not thread-safe."""

    def __init__(self, state: SamplingState, end_tokens: Iterable[int]) -> None:
        self._state = state
        self._device = device = state.parameters.device
        self._end_tokens = torch.tensor(sorted(end_tokens), dtype=torch.long, device=device)
        self.is_end = torch.zeros(state.vocabulary, dtype=torch.bool, device=device)
        """Whether each token is an end token of the checkpoint: [vocabulary], bool."""
        self.is_end.index_fill_(0, self._end_tokens, True)
        # Guides' bit masks on the host, [slots, ceil(vocabulary / 32)]; allocated with the first guide.
        self._guided: torch.Tensor | None = None

    def sample(
        self, logits: torch.Tensor, first: int, sequences: list[Sequence], features: SamplingFeatures
    ) -> torch.Tensor:
        """Sample the next token of consecutive rows from row `first` on, and count it in the rows' histories.

        logits: [rows, vocabulary], any float dtype. sequences: one per row. features: at least those of the sequences.
        Returns [rows], long; FAILED where a row's logits aren't finite. Counting comes last: after an exception, the
        same rows can be sampled again.
        """
        rows = slice(first, first + len(sequences))
        # Fill the guides' masks first: on a GPU the forward pass is still running, and the host fills them meanwhile.
        # On a CPU nothing overlaps, but a mask takes about 10 µs, less than handing it to another thread.
        per_row = _per_row(sequences) if features.per_row else []
        allowed = self._fill_guides(rows, per_row)
        raw = logits.float()
        logits = self.penalize(_bias(raw, per_row), rows, features)
        logits = self._mask(logits, sequences, per_row, allowed)
        keys = to_device(torch.from_numpy(self.keys(first, sequences)), self._device) if features.noise else None
        tokens, finite = self._choose(logits, rows, features, keys)
        if features.log_probs:
            _record_log_probs(raw, tokens, sequences)
        return self._count(tokens, finite, rows, features)

    def keys(self, first: int, sequences: list[Sequence]) -> NDArray[np.int64]:
        """Return the random words for the next draw of the rows from `first` on: [rows, 2]."""
        steps = np.asarray([sequence.num_output_tokens for sequence in sequences], dtype=np.int64)
        return step_keys(self._state.seeds[first : first + len(sequences)], steps)

    def penalize(self, logits: torch.Tensor, rows: slice, features: SamplingFeatures) -> torch.Tensor:
        """Return logits [rows, vocabulary] with the rows' repetition, frequency and presence penalties."""
        if not features.repetition and not features.output_counts:
            return logits
        state = self._state
        if features.repetition:
            repetition = state.column("repetition_penalty", rows)
            seen = state.in_prompt[rows] | (state.counts[rows] > 0)
            # Skip rows with a penalty of 1: clamping would make infinite logits finite, and such a row must fail
            # regardless of other rows' penalties.
            logits = penalize_repetition(logits, seen & (repetition != 1.0)[:, None], repetition)
        if features.output_counts:
            frequency, presence = (state.column(f"{name}_penalty", rows) for name in ("frequency", "presence"))
            logits = penalize_output(logits, state.counts[rows], frequency, presence)
        return logits

    def select(
        self, logits: torch.Tensor, rows: slice, features: SamplingFeatures, keys: torch.Tensor | None
    ) -> torch.Tensor:
        """Return tokens [rows] sampled from penalized and masked logits, and count them. keys: random words, [rows, 2].

        The kernels depend on shapes and `features` only, so that they can be captured in a CUDA graph.
        """
        return self._count(*self._choose(logits, rows, features, keys), rows, features)

    def _choose(
        self, logits: torch.Tensor, rows: slice, features: SamplingFeatures, keys: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sampled tokens, [rows], and whether each row's maximum logit is finite, [rows]."""
        best, tokens = _best(logits)
        # A NaN anywhere makes the maximum NaN; a row whose tokens are all masked has a maximum of -inf.
        finite = best.isfinite()
        if features.noise:
            assert keys is not None, "a draw needs random words"
            tokens = self._draw(logits, tokens, finite, rows, features, keys)
        return tokens, finite

    def _count(
        self, tokens: torch.Tensor, finite: torch.Tensor, rows: slice, features: SamplingFeatures
    ) -> torch.Tensor:
        """Count tokens [rows] in the rows' histories; return them, with FAILED where `finite` [rows] is False."""
        selected = torch.where(finite, tokens, FAILED)
        if features.repetition or features.output_counts:
            self._state.counts[rows].scatter_add_(
                1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.int32)
            )
        return selected

    def _draw(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        rows: slice,
        features: SamplingFeatures,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """Return the tokens [rows], replaced by random draws in rows with a temperature > 0.

        tokens: greedy tokens, [rows]. finite: [rows], bool; draws of other rows are discarded.
        """
        state = self._state
        temperature, top_p = state.column("temperature", rows), state.column("top_p", rows)
        top_k, sampled = state.top_k[rows], temperature > 0
        log_min_p = state.column("min_p", rows).log() if features.min_p else None
        if on_cpu(logits):
            drawing = (sampled & finite).nonzero()[:, 0]
            if len(drawing) == len(logits):
                return draw_on_cpu(logits, temperature, top_k, top_p, keys, log_min_p)
            if len(drawing):
                tokens[drawing] = draw_on_cpu(
                    logits[drawing],
                    temperature[drawing],
                    top_k[drawing],
                    top_p[drawing],
                    keys[drawing],
                    None if log_min_p is None else log_min_p[drawing],
                )
            return tokens
        warm = apply_temperature(logits, torch.where(sampled, temperature, 1.0))
        if log_min_p is not None:
            warm = keep_min_p(warm, log_min_p)
        if features.truncation:
            warm = keep_top_k_top_p(warm, top_k, top_p)
        return torch.where(sampled, draw(warm, keys), tokens)

    def _fill_guides(self, rows: slice, per_row: _PerRow) -> torch.Tensor | None:
        """Return the guides' bit masks on the device, [rows, ceil(vocabulary / 32)]; None if no row has a guide.

        All bits are set in rows without a guide.
        """
        guided = [(row, processor) for row, processor in per_row if processor.is_guided]
        if not guided:
            return None
        if self._guided is None:
            slots, words = len(self._state.seeds), -(-self._state.vocabulary // 32)
            self._guided = torch.empty(slots, words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        # Each row has its own buffer, because other rows of this step may still be copied asynchronously. The copies of
        # the previous step are done.
        host = self._guided[rows]
        bits = host.numpy()
        bits.fill(-1)
        for row, processor in guided:
            processor.fill(bits[row])
        return host.to(self._device, non_blocking=True)

    def _mask(
        self, logits: torch.Tensor, sequences: list[Sequence], per_row: _PerRow, allowed: torch.Tensor | None
    ) -> torch.Tensor:
        """Mask end tokens before min_tokens, and apply guides and row processors. allowed: the guides' bit masks."""
        too_early = [
            row for row, sequence in enumerate(sequences) if sequence.num_output_tokens < sequence.request.min_tokens
        ]
        if not too_early and not per_row:
            return logits
        logits = logits.clone()
        if allowed is not None:
            logits.masked_fill_(forbidden(allowed, self._state.vocabulary), -torch.inf)
        for row, processor in per_row:
            processor.mask(logits[row], row in too_early)
        # Row processors mask the end tokens of their sequences themselves.
        plain = [row for row in too_early if sequences[row].processor is None] if per_row else too_early
        if plain and len(self._end_tokens):
            logits[to_device(plain, self._device)[:, None], self._end_tokens] = -torch.inf
        return logits


def _per_row(sequences: list[Sequence]) -> _PerRow:
    return [(row, sequence.processor) for row, sequence in enumerate(sequences) if sequence.processor is not None]


def _bias(logits: torch.Tensor, per_row: _PerRow) -> torch.Tensor:
    """Return the logits with the rows' biases added; a copy if any row has a bias."""
    biased = [(row, processor) for row, processor in per_row if processor.has_bias]
    if not biased:
        return logits
    logits = logits.clone()
    for row, processor in biased:
        processor.bias(logits[row])
    return logits


def _record_log_probs(logits: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]) -> None:
    """Set the log probability of the next token of each sequence that requests log probabilities.

    logits: [rows, vocabulary], raw. tokens: [rows]. Repeatable: a second call replaces the values of the first.
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.needs_log_probs]
    if rows:
        top = [sequences[row].request.num_logprobs or 0 for row in rows]
        indices = to_device(rows, logits.device)
        for row, log_probs in zip(rows, log_probs_of(logits[indices], tokens[indices], top), strict=True):
            sequences[row].next_log_probs = log_probs


def failure_of(sequence: Sequence) -> RequestError:
    """Return the error of a sequence whose sampled token is FAILED."""
    request, processor, count = sequence.request, sequence.processor, sequence.num_output_tokens
    if isinstance(sequence.result, RequestError):
        # The computation of its logits failed.
        return sequence.result
    if processor is not None and processor.problem is not None:
        return processor.problem
    if processor is not None and processor.leaves_nothing(count < request.min_tokens):
        names = ("guided_decoding_guide_type", "allowed_token_ids", "bad_words", "ignore_eos", "min_tokens")
        masks = ", ".join(name for name in names if getattr(request, name))
        return InvalidRequest(f"{masks} together allow no token after {count} tokens; at least one must be allowed")
    return GenerationError("the model's logits for this request were not finite")


def on_cpu(logits: torch.Tensor) -> bool:
    """Return whether the logits are in host memory, so that reading them needs no synchronization."""
    return logits.device.type == "cpu"


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum logit (NaN if the row has one) and the first token that has it: both [rows]."""
    if not on_cpu(logits):
        best, tokens = logits.max(-1)
        return best, tokens
    # NumPy's argmax is vectorized, PyTorch's is not: 0.05 and 0.3 ms for 32 rows of 32,000 tokens.
    tokens = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(-1, tokens[:, None])[:, 0], tokens
