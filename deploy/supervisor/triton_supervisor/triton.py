"""Triton over HTTP: what its metrics say of the model, and its repository API, which loads and unloads models.

Unloading drains: Triton refuses new requests, answers the accepted ones, running or queued, and then ends the model's
processes. The API needs a key, and Triton accepts the orders only in explicit model control (tritonserver_options.py).
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
WAITING = "llama_waiting_requests"
PENDING = "nv_inference_pending_request_count"
"""Triton's own: requests in its queue."""
METRICS_S = 2.0
"""Timeout of the metrics page; a thread of tritonserver that does nothing else serves it."""

_ANSWER_S = 2.0
_UNLOAD_ANSWER_S = 5.0
_MIN_TIMEOUT_S = 0.05
"""A socket timeout of 0 would make the socket non-blocking."""
_SERIES = re.compile(r"^(\w+)\{(.*)\} ([-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)$", re.MULTILINE)
_LABEL = f'model="{MODEL}"'
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


class AnswerError(Exception):
    """No complete or an unexpected HTTP response; the message is one line and names the address."""


class AnswerTimeoutError(AnswerError):
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
        AnswerError: the address is unreachable or doesn't speak HTTP.
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
        raise AnswerError(f"{address} can't be asked: {' '.join(text.split()) or type(error).__name__}") from error
    finally:
        connection.close()


def last_steps(metrics: Address) -> list[float]:
    """Return when each instance of the model made its last step, in seconds since 1970, 0 before the first one.

    A process that died leaves its last value on the page. Raises AnswerError if the page can't be read, or isn't the
    model's.
    """
    steps = [value for name, labels, value in _series(metrics) if name == LAST_STEP and _LABEL in labels.split(",")]
    if not steps:
        raise AnswerError(f"{metrics} has no {LAST_STEP} of the model {MODEL}")
    return steps


def is_idle(metrics: Address) -> bool:
    """Return whether nothing waits or runs in any model; False also if the page can't be read."""
    try:
        return not any(value for name, _, value in _series(metrics) if name in (PENDING, SLOTS_IN_USE, WAITING))
    except AnswerError:
        return False


def _series(metrics: Address) -> list[tuple[str, str, float]]:
    """Return name, labels and value of each series of a metrics page. Raises AnswerError."""
    page = exchange(metrics, "GET", "/metrics", METRICS_S).body
    return [(name, labels, float(value)) for name, labels, value in _SERIES.findall(page)]


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
        except AnswerError:
            return False

    def unload(self, model: str) -> None:
        """Start unloading a model; returns before it is unloaded. Raises AnswerError."""
        answer = self._ask("POST", f"/v2/repository/models/{model}/unload", _UNLOAD_ANSWER_S)
        if answer.status != 200:
            raise _unexpected(answer)

    def is_loaded(self, model: str) -> bool:
        """Return whether a model still runs, if only for accepted requests. Raises AnswerError."""
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


def _unexpected(answer: Response) -> AnswerError:
    return AnswerError(f"HTTP {answer.status}: {' '.join(answer.body.split())[:300]}")
