"""The load itself, on locust: every user is a greenlet that sends a request and waits for its answer.

Closed: so many users, each of which sends until nothing is left. Open: at each moment of arrival a new user comes,
sends one request and goes; so no arrival waits for an answer, however many are outstanding.

Knows no warm-up: what comes first and isn't counted is sent in the same row as all others, so that the counted ones
meet a server that is at work.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence

from locust import User, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner

from perf.load.arrivals import Closed, Poisson
from perf.load.exchange import Clock, exchange
from perf.load.plan import Asked, Plan
from perf.load.records import Record
from perf.load.target import Target


def generate(plan: Plan) -> list[Record]:
    """Run the plan; one record for each request, in their order."""
    return _Generation(plan.target, plan.requests, plan.arrivals, plan.timeout).run()


class _Generation:
    """A series of requests, from an idle server until the last one is answered or the time is over."""

    def __init__(self, target: Target, requests: Sequence[Asked], arrivals: Closed | Poisson, seconds: float) -> None:
        self._target = target
        self._requests = requests
        self._arrivals = arrivals
        self._moments = arrivals.moments(len(requests)) if isinstance(arrivals, Poisson) else None
        self._waiting = deque(range(len(requests)))
        self._records: dict[int, Record] = {}
        self._deadline = seconds
        self._clock = Clock()

    def run(self) -> list[Record]:
        """Send them all; a record each."""
        runner = Environment(user_classes=[self._user_class()]).create_local_runner()
        # Making the runner takes time that belongs to no request.
        self._clock = Clock()
        if isinstance(self._arrivals, Closed):
            runner.spawn_users({"_Caller": min(self._arrivals.concurrency, len(self._requests))})
        else:
            self._arrive(runner)
        runner.user_greenlets.join()
        runner.quit()
        # Locust catches what goes wrong in our own code, and goes on.
        for fault in runner.exceptions.values():
            sys.stderr.write(fault["traceback"])
            raise RuntimeError(f"the fault is the load generator's: {fault['msg']}")
        return [self._records[number] for number in range(len(self._requests))]

    def send_next(self, free: float | None) -> float | None:
        """Send the next request and wait for its answer, for a user who is free since then; None: has just come.

        Return since when the user is free again; None if there is nothing left for this user.
        """
        if not self._waiting:
            return None
        number = self._waiting.popleft()
        # Not now: other users' answers may have been read since this one's.
        scheduled = self._clock.now() if free is None else free
        if self._moments is not None:
            scheduled = self._moments[number]
        asked = self._requests[number]
        record = exchange(self._target, asked, self._clock, scheduled, self._deadline)
        self._records[number] = record
        return record.ended if self._moments is None else None

    def _arrive(self, runner: LocalRunner) -> None:
        assert self._moments is not None
        for moment in self._moments:
            # After the deadline they come at once, and each is recorded as not sent.
            time.sleep(max(0.0, min(moment, self._deadline) - self._clock.now()))
            runner.spawn_users({"_Caller": 1})

    def _user_class(self) -> type[User]:
        generation = self

        class _Caller(User):
            free: float | None = None

            @task
            def call(self) -> None:
                self.free = generation.send_next(self.free)
                if self.free is None:
                    raise StopUser

        return _Caller
