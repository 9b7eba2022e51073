"""Clients that ask one question after the other until they are told to stop, each in its thread. Knows no protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from server.servers import until

MOST_QUESTIONS = 100_000
"""Of each client; more than any machine answers while it is watched, so that one that nobody stops has an end."""

Ask = Callable[[], str]


class SteadyLoad:
    """What the clients have been answered so far."""

    def __init__(self, clients: int) -> None:
        self.answers: list[list[str]] = [[] for _ in range(clients)]
        self._futures: list[Future[None]] = []

    def wait_for_more(self) -> None:
        """Wait until every client has been answered once more. Raises what a client has failed with."""
        before = [len(answers) for answers in self.answers]

        def all_have_more() -> bool:
            for future in self._futures:
                if future.done():
                    future.result()
            return all(len(now) > then for now, then in zip(self.answers, before, strict=True))

        until(all_have_more, lambda: f"every client is answered again; answers: {[len(one) for one in self.answers]}")

    def run(self, pool: ThreadPoolExecutor, asks: Sequence[Ask], stop: Event) -> None:
        """Start the clients."""
        self._futures = [
            pool.submit(_keep_asking, ask, answers, stop) for ask, answers in zip(asks, self.answers, strict=True)
        ]

    def end(self) -> None:
        """Wait for the answers to the last questions. Raises what a client has failed with."""
        for future in self._futures:
            future.result()


@contextmanager
def steady_load(asks: Sequence[Ask]) -> Iterator[SteadyLoad]:
    """Load for as long as the context lasts, from the moment when every client has had an answer.

    At the end no question is left open. Raises what a client has failed with.
    """
    stop = Event()
    load = SteadyLoad(len(asks))
    with ThreadPoolExecutor(len(asks)) as pool:
        try:
            load.run(pool, asks, stop)
            load.wait_for_more()
            yield load
        finally:
            stop.set()
        load.end()


def _keep_asking(ask: Ask, answers: list[str], stop: Event) -> None:
    while not stop.is_set():
        assert len(answers) < MOST_QUESTIONS, f"{MOST_QUESTIONS} answers, and nobody has told this client to stop"
        answers.append(ask())
