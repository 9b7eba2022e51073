"""Samples the next token of every sequence of a batch, each with its own parameters.

The order is: bias, repetition penalty, frequency and presence penalties, mask, temperature, min-p, top-k, top-p, draw.
Penalties, sorting and noise (`draw`) are skipped if no sequence of the batch uses them. A sequence's token never
depends on the features that others use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from llama_engine.errors import GenerationError, InvalidRequest, RequestError
from llama_engine.kernels.transfers import to_device
from llama_engine.sampling.bias_and_masks import LogitsProcessor, forbidden
from llama_engine.sampling.draw import draw, draw_on_cpu, position_keys
from llama_engine.sampling.filters import filtered
from llama_engine.sampling.log_probs import pack, unpack
from llama_engine.sampling.penalties import penalize_output, penalize_repetition
from llama_engine.sampling.state import BatchIndices, SamplingFeatures, SamplingState

if TYPE_CHECKING:
    from llama_engine.engine.sequence import Sequence

FAILED = -1
"""Token of a sequence whose logits are not finite."""

_Processors = list[tuple[int, LogitsProcessor]]
"""The processors of a batch's sequences, each with its sequence's place in the logits [batch, vocabulary]."""


class Sampler:
    """Samples tokens from logits. Not thread-safe."""

    def __init__(self, state: SamplingState, end_tokens: Iterable[int]) -> None:
        self._state = state
        self._device = device = state.parameters.device
        self._end_tokens = torch.tensor(sorted(end_tokens), dtype=torch.long, device=device)
        self.is_end = torch.zeros(state.vocabulary, dtype=torch.bool, device=device)
        """Whether each token is an end token of the checkpoint: [vocabulary], bool."""
        self.is_end.index_fill_(0, self._end_tokens, True)
        # The guides' bit masks on the host, [slots, ceil(vocabulary / 32)], are allocated with the first guide.
        self._guided: torch.Tensor | None = None

    def sample(
        self, logits: torch.Tensor, indices: BatchIndices, sequences: list[Sequence], features: SamplingFeatures
    ) -> torch.Tensor:
        """Sample the next token of the sequences at these batch indices, and count it in their histories.

        logits: [batch, vocabulary], any float dtype; they may be changed in place. features: at least those of the
        sequences. Returns [batch], long; FAILED where a sequence's logits aren't finite. Counting comes last: after an
        exception, the same sequences can be sampled again.
        """
        # Fill the guides' masks first: on a GPU the forward pass is still running, and the host fills them meanwhile.
        # On a CPU nothing overlaps, but a mask takes about 10 µs, less than handing it to another thread.
        processors = _processors(sequences) if features.processors else []
        allowed = self._fill_guides(indices, processors)
        raw = logits.float()
        # Log probabilities are of the raw logits.
        kept = raw if features.log_probs else None
        logits = self.penalize(_bias(raw, processors, kept), indices, features)
        logits = self._mask(logits, sequences, processors, allowed, kept)
        keys = to_device(torch.from_numpy(self.keys(indices, sequences)), self._device) if features.noise else None
        tokens, finite = self._choose(logits, indices, features, keys)
        if features.log_probs:
            _record_log_probs(raw, tokens, sequences)
        return self._count(tokens, finite, indices, features)

    def keys(self, indices: BatchIndices, sequences: list[Sequence]) -> NDArray[np.int64]:
        """Return the random words for the next draw of the sequences at these batch indices: [batch, 2].

        They depend on the position in prompt and output together, so that a request that is continued elsewhere, as its
        prompt and the tokens so far, draws the same tokens.
        """
        positions = np.asarray([sequence.num_tokens for sequence in sequences], dtype=np.int64)
        return position_keys(self._state.seeds[indices], positions)

    def penalize(self, logits: torch.Tensor, indices: BatchIndices, features: SamplingFeatures) -> torch.Tensor:
        """Return logits [batch, vocabulary] with the sequences' repetition, frequency and presence penalties."""
        if not features.repetition and not features.output_counts:
            return logits
        state = self._state
        if features.repetition:
            repetition = state.column("repetition_penalty", indices)
            seen = state.in_prompt[indices] | (state.counts[indices] > 0)
            # Skip sequences with a penalty of 1: clamping would make infinite logits finite, and such a sequence must
            # fail regardless of the others' penalties.
            logits = penalize_repetition(logits, seen & (repetition != 1.0)[:, None], repetition)
        if features.output_counts:
            frequency, presence = (state.column(f"{name}_penalty", indices) for name in ("frequency", "presence"))
            logits = penalize_output(logits, state.counts[indices], frequency, presence)
        return logits

    def select(
        self, logits: torch.Tensor, indices: BatchIndices, features: SamplingFeatures, keys: torch.Tensor | None
    ) -> torch.Tensor:
        """Return tokens [batch] sampled from penalized and masked logits, and count them.

        keys: random words, [batch, 2]. The kernels depend on shapes and `features` only, so that they can be captured
        in a CUDA graph.
        """
        return self._count(*self._choose(logits, indices, features, keys), indices, features)

    def _choose(
        self, logits: torch.Tensor, indices: BatchIndices, features: SamplingFeatures, keys: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sampled tokens, [batch], and whether each sequence's maximum logit is finite, [batch]."""
        best, tokens = _best(logits)
        # A NaN anywhere makes the maximum NaN; if all tokens are masked, it is -inf.
        finite = best.isfinite()
        if features.noise:
            assert keys is not None, "a draw needs random words"
            tokens = self._draw(logits, tokens, finite, indices, features, keys)
        return tokens, finite

    def _count(
        self, tokens: torch.Tensor, finite: torch.Tensor, indices: BatchIndices, features: SamplingFeatures
    ) -> torch.Tensor:
        """Count tokens [batch] in the histories; return them, with FAILED where `finite` [batch] is False."""
        selected = torch.where(finite, tokens, FAILED)
        if features.repetition or features.output_counts:
            self._state.count(indices, tokens)
        return selected

    def _draw(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        indices: BatchIndices,
        features: SamplingFeatures,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """Return the tokens [batch], replaced by random draws where the temperature is > 0.

        tokens: greedy tokens, [batch]. finite: [batch], bool; draws of other sequences are discarded.
        """
        state = self._state
        temperature, top_p = state.column("temperature", indices), state.column("top_p", indices)
        top_k, sampled = state.top_k[indices], temperature > 0
        log_min_p = state.column("min_p", indices).log() if features.min_p else None
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
        temperature = torch.where(sampled, temperature, 1.0)
        logits = filtered(logits, temperature, top_k, top_p, log_min_p, features.truncation)
        return torch.where(sampled, draw(logits, keys), tokens)

    def _fill_guides(self, indices: BatchIndices, processors: _Processors) -> torch.Tensor | None:
        """Return the guides' bit masks on the device, [batch, ceil(vocabulary / 32)]; None if there is no guide.

        All bits are set for sequences without a guide.
        """
        guided = [(place, processor) for place, processor in processors if processor.is_guided]
        if not guided:
            return None
        if self._guided is None:
            slots, words = len(self._state.seeds), -(-self._state.vocabulary // 32)
            self._guided = torch.empty(slots, words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        # Each sequence has its own buffer, because others of this step may still be copied asynchronously. The copies
        # of the previous step are done.
        host = self._guided[indices]
        bits = host.numpy()
        bits.fill(-1)
        for place, processor in guided:
            processor.fill(bits[place])
        return host.to(self._device, non_blocking=True)

    def _mask(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        processors: _Processors,
        allowed: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        """Mask end tokens before min_tokens, and apply guides and logits processors; in place unless `kept`.

        allowed: the guides' bit masks. kept: logits that must not change.
        """
        too_early = [
            place
            for place, sequence in enumerate(sequences)
            if sequence.num_output_tokens < sequence.request.min_tokens
        ]
        if not too_early and not processors:
            return logits
        if logits is kept:
            logits = logits.clone()
        if allowed is not None:
            logits.masked_fill_(forbidden(allowed, self._state.vocabulary), -torch.inf)
        for place, processor in processors:
            processor.mask(logits[place], place in too_early)
        # Logits processors mask the end tokens of their sequences themselves.
        plain = [place for place in too_early if sequences[place].processor is None] if processors else too_early
        if plain and len(self._end_tokens):
            logits[to_device(plain, self._device)[:, None], self._end_tokens] = -torch.inf
        return logits


def _processors(sequences: list[Sequence]) -> _Processors:
    return [(place, sequence.processor) for place, sequence in enumerate(sequences) if sequence.processor is not None]


def _bias(logits: torch.Tensor, processors: _Processors, kept: torch.Tensor | None) -> torch.Tensor:
    """Add the sequences' biases to the logits; in place unless these are `kept`."""
    biased = [(place, processor) for place, processor in processors if processor.has_bias]
    if biased and logits is kept:
        logits = logits.clone()
    for place, processor in biased:
        processor.bias(logits[place])
    return logits


def _record_log_probs(logits: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]) -> None:
    """Set the log probability of the next token of each sequence that requests log probabilities.

    logits: [batch, vocabulary], raw. tokens: [batch]. Repeatable: a second call replaces the values of the first.
    """
    requesting = [place for place, sequence in enumerate(sequences) if sequence.request.needs_log_probs]
    if requesting:
        top = [sequences[place].request.num_logprobs or 0 for place in requesting]
        places = to_device(requesting, logits.device)
        packed = pack(logits[places], tokens[places], top)
        for place, log_probs in zip(requesting, unpack(packed, top), strict=True):
            sequences[place].next_log_probs = log_probs


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
    """Return each sequence's maximum logit (NaN if it has one) and the first token that has it: both [batch]."""
    if not on_cpu(logits):
        best, tokens = logits.max(-1)
        return best, tokens
    # NumPy's argmax is vectorized, PyTorch's is not: 0.05 and 0.3 ms for 32 × 32,000 logits.
    tokens = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(-1, tokens[:, None])[:, 0], tokens
