"""The stopwatch and the tree of parts: every second is in one part, and methods are restored."""

import pytest

from perf.overhead.stopwatch import Node, Probe, Stopwatch, flatten


class Work:
    def outer(self) -> str:
        return self.inner() + self.inner()

    def inner(self) -> str:
        return "x"

    def failing(self) -> None:
        self.inner()
        raise ValueError("as it should")


PROBES = [Probe(Work, "outer", "out"), Probe(Work, "inner", "in"), Probe(Work, "failing", "fail")]


def _nothing() -> None:
    pass


def test_calls_during_a_measurement_are_counted_under_their_callers() -> None:
    stopwatch = Stopwatch("all", _nothing)
    with stopwatch.on(PROBES):
        assert Work().outer() == "xx"
        assert not stopwatch.whole.parts
        with stopwatch.running():
            assert Work().outer() == "xx"
            Work().inner()
    whole = stopwatch.whole
    assert {name: part.calls for name, part in whole.parts.items()} == {"out": 1, "in": 1}
    assert {name: part.calls for name, part in whole.parts["out"].parts.items()} == {"in": 2}
    assert 0 < whole.parts["out"].parts["in"].seconds <= whole.parts["out"].seconds <= whole.seconds


def test_methods_are_restored_and_a_failing_one_is_closed() -> None:
    before = {name: vars(Work)[name] for name in ("outer", "inner", "failing")}
    stopwatch = Stopwatch("all", _nothing)
    with stopwatch.on(PROBES), stopwatch.running():
        with pytest.raises(ValueError, match="as it should"):
            Work().failing()
        Work().inner()
    assert {name: vars(Work)[name] for name in before} == before
    assert {name: part.calls for name, part in stopwatch.whole.parts.items()} == {"fail": 1, "in": 1}


def test_a_part_ends_when_the_device_is_done() -> None:
    settled: list[str] = []
    stopwatch = Stopwatch("all", lambda: settled.append("settled"))
    with stopwatch.on(PROBES), stopwatch.running():
        Work().inner()
    # Before and after the whole, and before and after the part.
    assert len(settled) == 4


def _tree() -> Node:
    whole = Node("all", seconds=10.0)
    whole.take("small", 1.0)
    large = whole.take("large", 6.0)
    large.take("left", 2.0)
    large.take("right", 3.0)
    return whole


def test_parts_add_up_to_their_whole() -> None:
    parts = flatten(_tree(), tokens=100)
    assert [(part.name, part.parent, part.seconds, part.share) for part in parts] == [
        ("all", "", 10.0, 1.0),
        ("all/large", "all", 6.0, 0.6),
        ("all/large/right", "all/large", 3.0, 0.3),
        ("all/large/left", "all/large", 2.0, 0.2),
        ("all/large/the rest of large", "all/large", 1.0, 0.1),
        ("all/the rest of all", "all", 3.0, 0.3),
        ("all/small", "all", 1.0, 0.1),
    ]
    assert parts[0].per_token_us == 100_000.0
