"""The thread that sends: order, joining, turns, and that nothing is lost or delayed by another."""

import threading
from collections.abc import Iterator

import pytest
from llama_engine.engine.dispatcher import ResponseDispatcher
from llama_engine.engine.events import Chunk, Completion, Event

SECONDS = 30.0
"""How long a test waits for another thread before it fails."""


class _Sink:
    """Keeps what it receives. gate: send waits for it. broken: send raises."""

    def __init__(self, name: str, log: list[str], gate: threading.Event | None = None, broken: bool = False) -> None:
        self.name = name
        self.sent: list[list[Event]] = []
        self.reached = threading.Event()
        self._log = log
        self._gate = gate
        self._broken = broken

    def send(self, events: list[Event]) -> None:
        self.reached.set()
        if self._gate is not None:
            assert self._gate.wait(SECONDS)
        self._log.append(self.name)
        self.sent.append(list(events))
        if self._broken:
            raise ConnectionError("gone")

    def is_cancelled(self) -> bool:
        return False

    @property
    def texts(self) -> list[str]:
        """The chunks of each send, joined by commas."""
        return [",".join(event.text for event in events if isinstance(event, Chunk)) for events in self.sent]


def _chunk(number: int) -> Chunk:
    return Chunk(str(number), 1)


@pytest.fixture
def dispatcher() -> Iterator[ResponseDispatcher]:
    dispatcher = ResponseDispatcher()
    yield dispatcher
    assert dispatcher.close(SECONDS)


def test_events_that_wait_are_joined_in_order(dispatcher: ResponseDispatcher) -> None:
    log: list[str] = []
    gate = threading.Event()
    slow, a, b = _Sink("slow", log, gate), _Sink("a", log), _Sink("b", log)
    dispatcher.post([(slow, _chunk(0))])
    assert slow.reached.wait(SECONDS)
    for number in range(1, 6):
        dispatcher.post([(a, _chunk(number)), (b, _chunk(-number)), (slow, _chunk(number))])
    gate.set()
    assert dispatcher.close(SECONDS)
    assert log == ["slow", "a", "b", "slow"]
    assert (a.texts, b.texts, slow.texts) == (["1,2,3,4,5"], ["-1,-2,-3,-4,-5"], ["0", "1,2,3,4,5"])


@pytest.fixture
def pausing() -> Iterator[ResponseDispatcher]:
    """Pauses for the whole test after a round."""
    dispatcher = ResponseDispatcher(pause_rounds=10**9, max_pause=2 * SECONDS)
    yield dispatcher
    assert dispatcher.close(SECONDS)


def test_chunks_that_come_in_a_pause_are_sent_together(pausing: ResponseDispatcher) -> None:
    sink, other = _Sink("sink", []), _Sink("other", [])
    pausing.post([(sink, _chunk(0))])
    assert sink.reached.wait(SECONDS)
    for number in range(1, 4):
        pausing.post([(sink, _chunk(number))])
    # The thread has woken up and left the chunks where they are.
    pausing.post([(other, _chunk(0))])
    assert other.reached.wait(SECONDS)
    assert sink.texts == ["0"]
    assert pausing.close(SECONDS)
    assert sink.texts == ["0", "1,2,3"]


def test_chunks_are_sent_when_a_pause_ends() -> None:
    dispatcher, sink = ResponseDispatcher(pause_rounds=10**9, max_pause=0.05), _Sink("sink", [])
    for number in range(2):
        dispatcher.post([(sink, _chunk(number))])
        assert sink.reached.wait(SECONDS)
        sink.reached.clear()
    assert dispatcher.close(SECONDS)
    assert sink.texts == ["0", "1"]


def test_a_result_does_not_wait_for_the_end_of_a_pause(pausing: ResponseDispatcher) -> None:
    sink = _Sink("sink", [])
    pausing.post([(sink, _chunk(0))])
    assert sink.reached.wait(SECONDS)
    sink.reached.clear()
    pausing.post([(sink, _chunk(1)), (sink, Completion("", "stop", 1, 1))])
    assert sink.reached.wait(SECONDS)


def test_a_response_that_cannot_be_sent_stops_no_other(
    dispatcher: ResponseDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    broken, good = _Sink("broken", log, broken=True), _Sink("good", log)
    dispatcher.post([(broken, _chunk(1)), (good, _chunk(1))])
    assert good.reached.wait(SECONDS)
    dispatcher.post([(broken, _chunk(2))])
    assert dispatcher.close(SECONDS)
    assert log == ["broken", "good", "broken"]
    assert caplog.text.count("a response could not be sent") == 2


def test_close_sends_what_is_pending() -> None:
    dispatcher, log = ResponseDispatcher(), list[str]()
    gate = threading.Event()
    stuck, behind = _Sink("stuck", log, gate), _Sink("behind", log)
    dispatcher.post([(stuck, _chunk(1)), (behind, _chunk(1))])
    assert stuck.reached.wait(SECONDS)
    assert not dispatcher.close(0.05)
    gate.set()
    for _ in range(2):
        assert dispatcher.close(SECONDS)
    assert log == ["stuck", "behind"]
