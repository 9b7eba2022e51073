"""The thread that sends: order, joining when it is behind, taking turns, and that nothing is lost or held up."""

import threading
from collections.abc import Iterator, Sequence

import pytest
from llama_engine.response_dispatcher import Part, ResponseDispatcher
from llama_engine.sequence import Chunk

SECONDS = 30.0
"""How long a test waits for another thread before it gives up; none takes nearly so long."""


class _Reply:
    """Keeps what it is sent, and holds the sender up until its gate opens."""

    def __init__(self, name: str, log: list[str], gate: threading.Event | None = None, broken: bool = False) -> None:
        self.name = name
        self.sent: list[list[Part]] = []
        self.reached = threading.Event()
        self._log = log
        self._gate = gate
        self._broken = broken

    def send(self, parts: Sequence[Part]) -> None:
        self.reached.set()
        if self._gate is not None:
            assert self._gate.wait(SECONDS)
        self._log.append(self.name)
        self.sent.append(list(parts))
        if self._broken:
            raise ConnectionError("gone")

    def is_cancelled(self) -> bool:
        return False

    @property
    def texts(self) -> list[str]:
        """The pieces of each send, joined by commas."""
        return [",".join(part.what.text for part in parts if isinstance(part.what, Chunk)) for parts in self.sent]


def _part(number: int) -> Part:
    return Part(0, Chunk(str(number), 1))


@pytest.fixture
def delivery() -> Iterator[ResponseDispatcher]:
    delivery = ResponseDispatcher()
    yield delivery
    assert delivery.close(SECONDS)


def test_what_waits_is_not_joined_or_out_of_order_or_out_of_turn(delivery: ResponseDispatcher) -> None:
    log: list[str] = []
    gate = threading.Event()
    slow, a, b = _Reply("slow", log, gate), _Reply("a", log), _Reply("b", log)
    delivery.post([(slow, _part(0))])
    assert slow.reached.wait(SECONDS)
    for number in range(1, 6):
        delivery.post([(a, _part(number)), (b, _part(-number)), (slow, _part(number))])
    gate.set()
    assert delivery.close(SECONDS)
    assert log == ["slow", "a", "b", "slow"]
    assert (a.texts, b.texts, slow.texts) == (["1,2,3,4,5"], ["-1,-2,-3,-4,-5"], ["0", "1,2,3,4,5"])


def test_one_that_always_has_more_keeps_the_others_waiting(delivery: ResponseDispatcher) -> None:
    """Each send of the greedy one is followed by another part of it before its turn is over."""
    log: list[str] = []
    gate = threading.Event()

    class _Greedy(_Reply):
        def send(self, parts: Sequence[Part]) -> None:
            super().send(parts)
            if len(self.sent) < 4:
                delivery.post([(self, _part(len(self.sent)))])

    greedy, others = _Greedy("greedy", log, gate), [_Reply(name, log) for name in "xyz"]
    delivery.post([(greedy, _part(0))])
    assert greedy.reached.wait(SECONDS)
    delivery.post([(other, _part(1)) for other in others])
    gate.set()
    assert delivery.close(SECONDS)
    assert log == ["greedy", "x", "y", "z", "greedy", "greedy", "greedy"]


def test_parts_posted_by_several_threads_are_lost_or_out_of_order(delivery: ResponseDispatcher) -> None:
    log: list[str] = []
    replies = [_Reply(str(index), log) for index in range(6)]

    def post(mine: Sequence[_Reply]) -> None:
        for number in range(200):
            delivery.post([(reply, _part(number)) for reply in mine])

    threads = [threading.Thread(target=post, args=(replies[index : index + 2],)) for index in (0, 2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert delivery.close(SECONDS)
    for reply in replies:
        assert ",".join(reply.texts) == ",".join(map(str, range(200)))


def test_an_answer_that_cannot_be_sent_stops_the_others(
    delivery: ResponseDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    broken, good = _Reply("broken", log, broken=True), _Reply("good", log)
    delivery.post([(broken, _part(1)), (good, _part(1))])
    assert good.reached.wait(SECONDS)
    delivery.post([(broken, _part(2))])
    assert delivery.close(SECONDS)
    assert log == ["broken", "good", "broken"]
    assert caplog.text.count("an answer could not be sent") == 2


def test_close_drops_what_is_due_or_does_not_say_that_it_could_not_wait() -> None:
    delivery, log = ResponseDispatcher(), list[str]()
    gate = threading.Event()
    stuck, behind = _Reply("stuck", log, gate), _Reply("behind", log)
    delivery.post([(stuck, _part(1)), (behind, _part(1))])
    assert stuck.reached.wait(SECONDS)
    assert not delivery.close(0.05)
    gate.set()
    assert delivery.close(SECONDS)
    assert log == ["stuck", "behind"]
    assert delivery.close(SECONDS), "a second close"
