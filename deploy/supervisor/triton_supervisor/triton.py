"""Triton over HTTP: what its metrics say of the model, and its repository API, which loads and unloads models.

Unloading drains: Triton refuses new requests, answers the accepted ones, running or queued, and then ends the model's
processes. The API needs a key, and Triton accepts the orders only in explicit model control (command.py).
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

MODEL = "llama"
UNARY = "llama_unary"
"""Answers /infer and unary gRPC beside a decoupled MODEL, which it calls and which Triton takes streams only for."""

LAST_STEP = "llama_last_step_timestamp_seconds"
SLOTS_IN_USE = "llama_slots_in_use"
WAITING = "llama_waiting_rows"
PENDING = "nv_inference_pending_request_count"
"""Triton's own: requests in its queue."""
METRICS_S = 2.0
"""Timeout of the metrics page; a thread of tritonserver that does nothing else serves it."""

_ANSWER_S = 2.0
_UNLOAD_ANSWER_S = 5.0
_MIN_TIMEOUT_S = 0.05
"""A socket timeout of 0 would make the socket non-blocking."""
_CLOCK_SKEW_S = 1.0
_SERIES = re.compile(r"^(\w+)\{(.*)\} ([-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)$", re.MULTILINE)
_LOADED = ("READY", "LOADING", "UNLOADING")


class Address(NamedTuple):
    """A host name or IPv4 address and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `HOST:PORT`. Raises ValueError for another form, or a port outside 1 ... 65535."""
        match = re.fullmatch(r"([A-Za-z0-9._-]+):([0-9]{1,5})", text)
        if match is None or not 1 <= int(match[2]) <= 65535:
            raise ValueError(f"{text!r} is no address; it must be HOST:PORT, with a port of 1 ... 65535")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Response(NamedTuple):
    """A status and a whole body."""

    status: int
    body: str


class ApiError(Exception):
    """No complete or an unexpected HTTP response; the message is one line and names the address."""


class AnswerTimeoutError(ApiError):
    """The response took longer than the timeout."""


def exchange(
    address: Address,
    method: str,
    path: str,
    seconds: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Send one request (`body` as JSON) and read the whole response within `seconds`.

    Each exchange opens and closes its own connection: Triton waits for idle connections when it shuts down.

    Raises:
        AnswerTimeoutError: it took longer.
        ApiError: the address is unreachable or doesn't speak HTTP.
    """
    deadline = time.monotonic() + seconds
    # Not urllib, which would use a container's HTTP_PROXY.
    connection = http.client.HTTPConnection(*address, timeout=max(seconds, _MIN_TIMEOUT_S))
    try:
        connection.request(
            method, path, body, {"Connection": "close", "Content-Type": "application/json", **(headers or {})}
        )
        # The time left after connecting.
        connection.sock.settimeout(max(deadline - time.monotonic(), _MIN_TIMEOUT_S))
        response = connection.getresponse()
        return Response(response.status, response.read().decode(errors="replace"))
    except TimeoutError:
        raise AnswerTimeoutError(f"{address} doesn't answer within {seconds:.3g} s") from None
    except (OSError, http.client.HTTPException) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ApiError(f"{address} can't be asked: {' '.join(text.split()) or type(error).__name__}") from error
    finally:
        connection.close()


class Load(NamedTuple):
    """Requests that a page shows. queued: in Triton's queues. running: sequences with a slot. waiting: without one."""

    queued: float
    running: float
    waiting: float

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not any(self)


class Steps(NamedTuple):
    """The last step of each instance of the model at one moment.

    A process that died leaves its last values on the page, so a step is evidence only while it is recent or if it came
    since an earlier look.

    instances: seconds since 1970 by the instance's labels, 0 before the first step; empty if the page has none, and
    `trouble` then says why. load: None without a page.
    """

    instances: Mapping[str, float]
    load: Load | None = None
    trouble: str = ""

    def requests_wait(self) -> bool:
        """Return whether requests are in Triton's queue or in slots: a model that works makes a step for them."""
        return self.load is not None and not self.load.idle

    def recent(self, step_age: float) -> bool:
        """Return whether every instance made a step in the last `step_age` seconds."""
        ages = [time.time() - last_step for last_step in self.instances.values()]
        return bool(ages) and all(-_CLOCK_SKEW_S <= age <= step_age for age in ages)

    def advanced(self, before: Steps) -> bool:
        """Return whether any instance made a step since an earlier look; independent of clocks."""
        return any(last > before.instances.get(label, last) for label, last in self.instances.items())

    def describe_oldest(self) -> str:
        """Return the age of the last step, of the instance where it is oldest."""
        if not self.instances:
            return f"no metrics ({self.trouble})"
        oldest = min(self.instances.values())
        return f"the last step was {_age(oldest)} ago" if oldest > 0 else "no step yet"

    def describe_youngest(self) -> str:
        """Return the age of the most recent step of any instance."""
        return f"a step {_age(max(self.instances.values()))} ago"


def _age(last_step: float) -> str:
    age = max(time.time() - last_step, 0.0)
    return f"{age:.1f} s" if age < 10 else f"{age:.0f} s"


def _series(address: Address) -> list[tuple[str, str, float]]:
    """Return metric, labels and value of each series of a metrics page. Raises ApiError."""
    page = exchange(address, "GET", "/metrics", METRICS_S).body
    return [(metric, labels, float(value)) for metric, labels, value in _SERIES.findall(page)]


def read_steps(address: Address | None) -> Steps:
    """Read the metrics page; without one (None), or if it isn't this model's, the result has no instances."""
    if address is None:
        return Steps({}, trouble="switched off")
    try:
        series = [row for row in _series(address) if f'model="{MODEL}"' in row[1].split(",")]
    except ApiError as error:
        return Steps({}, trouble=str(error))
    instances = {labels: value for metric, labels, value in series if metric == LAST_STEP}
    if not instances:
        return Steps({}, trouble=f"{address} has no {LAST_STEP} of the model {MODEL}")
    return Steps(instances, _load(series))


def read_load(address: Address) -> Load | None:
    """Return what waits and runs in all models; None if the page can't be read."""
    try:
        return _load(_series(address))
    except ApiError:
        return None


def _load(series: list[tuple[str, str, float]]) -> Load:
    return Load(*(sum(row[2] for row in series if row[0] == metric) for metric in (PENDING, SLOTS_IN_USE, WAITING)))


class RepositoryApi:
    """Triton's model repository API at an address."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        """headers: the key's."""
        self._address = address
        self._headers = headers

    def is_ready(self, model: str) -> bool:
        """Return whether a model takes requests; False also without an answer."""
        try:
            return self._ask("GET", f"/v2/models/{model}/ready", _ANSWER_S).status == 200
        except ApiError:
            return False

    def unload(self, model: str) -> None:
        """Start unloading a model; returns before it is unloaded. Raises ApiError."""
        answer = self._ask("POST", f"/v2/repository/models/{model}/unload", _UNLOAD_ANSWER_S)
        if answer.status != 200:
            raise _unexpected(answer)

    def is_loaded(self, model: str) -> bool:
        """Return whether a model still runs, if only for accepted requests. Raises ApiError."""
        answer = self._ask("POST", "/v2/repository/index", _ANSWER_S)
        try:
            states = [entry.get("state") for entry in json.loads(answer.body) if entry["name"] == model]
        except (ValueError, KeyError, TypeError) as error:
            raise _unexpected(answer) from error
        if answer.status != 200:
            raise _unexpected(answer)
        return any(state in _LOADED for state in states)

    def _ask(self, method: str, path: str, seconds: float) -> Response:
        return exchange(self._address, method, path, seconds, headers=self._headers)


def _unexpected(answer: Response) -> ApiError:
    return ApiError(f"HTTP {answer.status}: {' '.join(answer.body.split())[:300]}")
