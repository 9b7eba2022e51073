"""Triton's model repository API over HTTP: is the model ready, unload it, is it unloaded.

Unloading drains: Triton refuses new requests, answers the accepted ones, running or queued, and then ends the model's
processes. The API needs a key, and Triton accepts the orders only if it was started with `control_arguments`.
"""

from __future__ import annotations

import json
import socket

from triton_llama.health import Address, NoAnswerError, NoListenerError, Response, exchange

from triton_supervisor.hardening import HTTP_HEADER, restricted_arguments

MODEL = "llama"

_ANSWER_S = 2.0
_UNLOAD_ANSWER_S = 5.0
_LOADED = ("READY", "LOADING", "UNLOADING")


class ApiError(Exception):
    """Triton gave no answer, or an unexpected one; the message is one line."""


class NotListeningError(ApiError):
    """Triton doesn't listen yet, or any more."""


def control_arguments(key: str) -> tuple[str, ...]:
    """Return tritonserver's options that allow to unload the model with the key, and only with it."""
    return ("--model-control-mode=explicit", f"--load-model={MODEL}", *restricted_arguments(key))


class RepositoryApi:
    """Triton at an address."""

    def __init__(self, address: Address, key: str) -> None:
        self._address = address
        self._key = key

    def listens(self) -> bool:
        """Return whether Triton accepts connections."""
        try:
            socket.create_connection(self._address, _ANSWER_S).close()
        except TimeoutError:
            return True  # too busy to accept, but listening
        except (OSError, OverflowError, UnicodeError):
            return False
        return True

    def model_is_ready(self) -> bool:
        """Return whether the model takes requests; False also without an answer."""
        try:
            return self._ask("GET", f"/v2/models/{MODEL}/ready", _ANSWER_S).status == 200
        except ApiError:
            return False

    def unload(self) -> None:
        """Start unloading the model; returns before it is unloaded. Raises ApiError."""
        answer = self._ask("POST", f"/v2/repository/models/{MODEL}/unload", _UNLOAD_ANSWER_S)
        if answer.status != 200:
            raise _unexpected(answer)

    def model_is_loaded(self) -> bool:
        """Return whether the model still runs, if only for accepted requests. Raises ApiError."""
        answer = self._ask("POST", "/v2/repository/index", _ANSWER_S)
        try:
            entries = json.loads(answer.body)
            states = [entry.get("state") for entry in entries if entry["name"] == MODEL]
        except (ValueError, KeyError, TypeError, AttributeError):
            states = None
        if answer.status != 200 or states is None:
            raise _unexpected(answer)
        return any(state in _LOADED for state in states)

    def _ask(self, method: str, path: str, seconds: float) -> Response:
        try:
            return exchange(self._address, method, path, seconds, headers={HTTP_HEADER: self._key})
        except NoListenerError as error:
            raise NotListeningError(str(error)) from error
        except NoAnswerError as error:
            raise ApiError(f"{path}: {error}") from error


def _unexpected(answer: Response) -> ApiError:
    return ApiError(f"HTTP {answer.status}: {' '.join(answer.body.split())[:300]}")
