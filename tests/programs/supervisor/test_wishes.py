"""What signals request of a supervisor, and of a guard below a launcher."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from triton_supervisor.loop import END, HEARD, PARENT_ENDS, Wish, Wishes


@pytest.fixture(autouse=True)
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("triton_supervisor.loop._POLL_S", 0.01)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    yield
    while signal.sigtimedwait(HEARD, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _requested(wishes: Wishes, *signals: signal.Signals) -> list[Wish]:
    """Send the signals together; return what they request."""
    for number in signals:
        signal.pthread_kill(threading.get_ident(), number)
    return [wish for _ in range(len(signals) + 1) if (wish := wishes.wait()) is not None]


@pytest.mark.parametrize("number", END)
def test_a_signal_of_others_ends_a_supervisor_and_not_a_guard(number: signal.Signals) -> None:
    assert _requested(Wishes(again_kills=True), number) == [Wish.END]
    assert _requested(Wishes(again_kills=False, parent=os.getppid()), number) == []


def test_a_guard_hears_its_launcher_beside_a_sigterm_to_its_control_group() -> None:
    guard = Wishes(again_kills=False, parent=os.getppid())
    assert _requested(guard, signal.SIGTERM, PARENT_ENDS) == [Wish.END]
    assert _requested(guard, signal.SIGTERM, signal.SIGQUIT) == [Wish.KILL]
