"""What one step of the engine did: the sequences that finished, and the counts for the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from llama_engine.engine.drafts import Draft
from llama_engine.engine.events import Completion
from llama_engine.engine.page_manager import CacheCounts
from llama_engine.engine.sequence import Sequence
from llama_engine.errors import InvalidRequest
from llama_engine.kernels.activation_terms import TermCounts


@dataclass
class StepResult:
    """The outcome of one step.

    finished: sequences that finished in this step. decoded: number of sequences in the decode step's forward pass.
    sampled: number of tokens appended. prefill_tokens: prompt tokens computed. errors: number of failed computations.
    term_counts: of exact INT8 products, including those of failed computations. drafts: the verified ones. verified:
    number of the appended tokens that followed a right guess. preempted: number of preemptions. cache: the KV
    cache's pages after the step, and what happened to them. dropped_kv_events: KV cache events that weren't published.
    """

    finished: list[Sequence] = field(default_factory=list)
    decoded: int = 0
    sampled: int = 0
    prefill_tokens: int = 0
    errors: int = 0
    term_counts: TermCounts = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)
    verified: int = 0
    preempted: int = 0
    cache: CacheCounts | None = None
    dropped_kv_events: int = 0

    @property
    def succeeded(self) -> bool:
        """Whether a token was appended or an embedding computed."""
        return bool(self.sampled) or any(isinstance(sequence.result, Completion) for sequence in self.finished)

    @property
    def failed(self) -> bool:
        """Whether the step produced only failures: no token or embedding, and a failed computation or sequence.

        A sequence that fails with InvalidRequest, because its masks leave no token, doesn't count as a failure.
        """
        return not self.succeeded and bool(
            self.errors or any(not isinstance(sequence.result, InvalidRequest) for sequence in self.finished)
        )
