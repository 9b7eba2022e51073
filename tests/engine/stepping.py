"""Run an engine step by step and record the steps."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine, StepResult
from llama_engine.sequence import Result, Sequence


@dataclass
class Run:
    """Sequences that went through an engine, in the order of their arrival, and every step."""

    sequences: list[Sequence]
    steps: list[StepResult] = field(default_factory=list)

    @property
    def results(self) -> list[Result]:
        """The result of each sequence."""
        results = [sequence.result for sequence in self.sequences if sequence.result is not None]
        assert len(results) == len(self.sequences), "a sequence ended without a result"
        return results

    @property
    def errors(self) -> int:
        return sum(step.errors for step in self.steps)

    @property
    def finished(self) -> list[Sequence]:
        """The sequences in the order in which they finished."""
        return [sequence for step in self.steps for sequence in step.finished]


def run_sequences(engine: Engine, sequences: Iterable[Sequence]) -> Run:
    """Add the sequences as soon as there are slots, and step until all have finished, each exactly once."""
    run = Run(list(sequences))
    waiting = deque(run.sequences)
    while waiting or engine.used_slots:
        while waiting and engine.used_slots < engine.slots:
            engine.add(waiting.popleft())
        run.steps.append(engine.step())
    assert len(run.finished) == len(set(run.finished)) == len(run.sequences)
    return run


def run_requests(engine: Engine, requests: Iterable[GenerationRequest]) -> Run:
    return run_sequences(engine, [engine.sequence(request) for request in requests])
