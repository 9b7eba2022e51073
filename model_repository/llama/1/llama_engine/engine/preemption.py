"""Preemption: where no page is free, the youngest sequence of the lowest priority loses its own for the time being.

`Prefill.requeue` puts it first in line; then its prompt and output are computed again, but for what is cached.
"""

from __future__ import annotations

from llama_engine.engine.decode import DecodeBatch
from llama_engine.engine.page_manager import PageManager
from llama_engine.engine.prefill import Prefill
from llama_engine.engine.sequence import Sequence


def extend_pages(pages: PageManager, batch: DecodeBatch, prefill: Prefill) -> int:
    """Give every decoding sequence a page for its next position, the oldest first; return how many were preempted."""
    preempted = 0
    for sequence in sorted(batch.sequences, key=_seniority):
        # Preempt until the sequence has its page or is itself preempted.
        while sequence.kv_slot is not None and not pages.extend(sequence):
            youngest = max(prefill.running, key=_seniority)
            if youngest in batch.sequences:
                batch.remove(batch.sequences.index(youngest))
            prefill.requeue(youngest)
            preempted += 1
    return preempted


def _seniority(sequence: Sequence) -> tuple[int, float]:
    """Return a sort key: sequences of high priority first, then the oldest."""
    return sequence.request.priority, sequence.arrived_at
