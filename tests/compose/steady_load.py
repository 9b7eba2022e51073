"""Clients that send one request after the other until they are stopped, each in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from server.servers import until

MAX_REQUESTS = 100_000
"""Of each client: an end for a client that is never stopped, beyond what any machine reaches in a test."""

Request = Callable[[], str]


class SteadyLoad:
    """The clients' responses so far, a list for each."""

    def __init__(self, pool: ThreadPoolExecutor, requests: Sequence[Request], stop: Event) -> None:
        self.responses: list[list[str]] = [[] for _ in requests]
        self._futures: list[Future[None]] = [
            pool.submit(_repeat, request, responses, stop)
            for request, responses in zip(requests, self.responses, strict=True)
        ]

    def wait_for_more(self) -> None:
        """Wait until every client has another response. Raises a client's exception."""
        before = [len(responses) for responses in self.responses]

        def all_have_more() -> bool:
            for future in self._futures:
                if future.done():
                    future.result()
            return all(len(now) > then for now, then in zip(self.responses, before, strict=True))

        until(all_have_more, lambda: f"every client has another response: {[len(one) for one in self.responses]}")

    def end(self) -> None:
        """Wait for the last responses. Raises a client's exception."""
        for future in self._futures:
            future.result()


@contextmanager
def steady_load(requests: Sequence[Request]) -> Iterator[SteadyLoad]:
    """Run the clients; yield once each has a response. At the end no request is left open.

    Raises a client's exception.
    """
    stop = Event()
    with ThreadPoolExecutor(len(requests)) as pool:
        load = SteadyLoad(pool, requests, stop)
        try:
            load.wait_for_more()
            yield load
        finally:
            stop.set()
        load.end()


def _repeat(request: Request, responses: list[str], stop: Event) -> None:
    while not stop.is_set():
        assert len(responses) < MAX_REQUESTS, f"{MAX_REQUESTS} responses, and the client was not stopped"
        responses.append(request())
