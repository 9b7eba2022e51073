"""A metrics registry that records."""

from collections import Counter, defaultdict

from llama_engine.observability.metrics import Metric


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

    def set(self, metric: Metric, amount: float) -> None:
        assert metric.kind == "gauge"
        self.levels[metric.name] = amount

    def observe(self, metric: Metric, amount: float) -> None:
        assert metric.kind == "histogram"
        self.observations[metric.name].append(amount)

    def close(self) -> None:
        self.closed = True
