"""The load itself, on locust: every user is a greenlet that sends a request and waits for its answer.

Closed: so many users, each of which sends until nothing is left. Open: at each moment of arrival a new user comes,
sends one request and goes; so no arrival waits for an answer, however many are outstanding.

The warm-up is a run of its own before: the measured requests meet an idle server, as every other server's do.
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

from load.arrivals import Closed, Poisson
from load.exchange import Clock, exchange
from load.plan import Asked, Plan
from load.records import Record
from load.target import Target


def generate(plan: Plan) -> list[Record]:
    """Run the plan; one record for each measured request, in their order."""
    whole = Clock()
    warmup, measured = plan.requests[: plan.warmup], plan.requests[plan.warmup :]
    if warmup:
        _Run(plan.target, warmup, plan.arrivals, plan.timeout).run()
    return _Run(plan.target, measured, plan.arrivals, plan.timeout - whole.now()).run()


class _Run:
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

    def send_next(self) -> bool:
        """Send the next request and wait for its answer; False once there is nothing left to do for this user."""
        if not self._waiting:
            return False
        number = self._waiting.popleft()
        scheduled = self._clock.now() if self._moments is None else self._moments[number]
        asked = self._requests[number]
        self._records[number] = exchange(self._target, asked, self._clock, scheduled, self._deadline)
        return self._moments is None

    def _arrive(self, runner: LocalRunner) -> None:
        assert self._moments is not None
        for moment in self._moments:
            # After the deadline they come at once, and each is recorded as not sent.
            time.sleep(max(0.0, min(moment, self._deadline) - self._clock.now()))
            runner.spawn_users({"_Caller": 1})

    def _user_class(self) -> type[User]:
        run = self

        class _Caller(User):
            @task
            def call(self) -> None:
                if not run.send_next():
                    raise StopUser

        return _Caller
