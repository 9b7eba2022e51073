"""What metrics are recorded of, finished sequences with known times, and a registry that keeps them."""

from collections import Counter, defaultdict

from llama_engine.engine.events import Result
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.observability.metrics import Metric
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.output_text import OutputText


class RecordingRegistry:
    """Adds up counters, keeps the last value of gauges and every observation."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.levels: dict[str, float] = {}
        self.observations: defaultdict[str, list[float]] = defaultdict(list)
        self.closed = False

    def add(self, metric: Metric, amount: float, value: str = "") -> None:
        assert metric.kind == "counter"
        assert value in metric.values
        self.counts[f"{metric.name} {value}".rstrip()] += int(amount)

    def set(self, metric: Metric, amount: float, value: str = "") -> None:
        assert metric.kind == "gauge"
        assert value in metric.values
        self.levels[f"{metric.name} {value}".rstrip()] = amount

    def observe(self, metric: Metric, amount: float) -> None:
        assert metric.kind == "histogram"
        self.observations[metric.name].append(amount)

    def close(self) -> None:
        self.closed = True


def finished_sequence(
    result: Result, prompt: str = "", tokens: int = 0, admitted_at: float = 12.0, first_token_at: float = 15.0
) -> Sequence:
    """A sequence of three prompt tokens that arrived at 10.0 and finished at 20.0. tokens: output tokens."""
    output = OutputText(min_tokens=0, max_tokens=9, stop_words=[], end_tokens=[])
    for token in range(tokens):
        output.add(token, b"x")
    return Sequence(
        GenerationRequest(prompt=prompt, prompt_tokens=(1, 2, 3), max_tokens=9), output,
        status=Status.FINISHED, result=result, arrived_at=10.0, admitted_at=admitted_at,
        first_token_at=first_token_at, finished_at=20.0,
    )  # fmt: skip
