"""Triton's model repository API over HTTP: is the model ready, unload it, is it unloaded.

Unloading drains: Triton refuses new requests, answers the accepted ones, running or queued, and then ends the model's
processes. Models that call others are unloaded before them. The API needs a key, and Triton accepts the orders only if
it was started with `control_arguments`.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from triton_supervisor.hardening import HTTP_HEADER, restricted_arguments
from triton_supervisor.triton_http import Address, NoAnswerError, NoListenerError, Response, exchange

MODEL = "llama"
UNARY = "llama_unary"
"""Answers /infer and unary gRPC beside a decoupled MODEL, which it calls and which Triton takes streams only for."""

_ANSWER_S = 2.0
_UNLOAD_ANSWER_S = 5.0
_LOADED = ("READY", "LOADING", "UNLOADING")
# In a config, outside its comments.
_DECOUPLED = re.compile(r"^[^#\n]*\bdecoupled\s*:\s*true\b", re.MULTILINE)


class ApiError(Exception):
    """Triton gave no answer, or an unexpected one; the message is one line."""


class NotListeningError(ApiError):
    """Triton doesn't listen yet, or any more."""


def served_models(repository: Path, config: str) -> tuple[str, ...]:
    """Return the models to load, each before those that call it: UNARY too, if MODEL's config is decoupled.

    config: "default", or the name of a file in configs/. A copied repository need not have UNARY.
    """
    model = repository / MODEL
    file = model / "config.pbtxt" if config == "default" else model / "configs" / f"{config}.pbtxt"
    decoupled = file.is_file() and _DECOUPLED.search(file.read_text(encoding="utf-8")) is not None
    return (MODEL, UNARY) if decoupled and (repository / UNARY).is_dir() else (MODEL,)


def control_arguments(key: str, models: Sequence[str] = (MODEL,)) -> tuple[str, ...]:
    """Return tritonserver's options that load these models, and allow to unload them with the key, and only with it."""
    return (*load_arguments(models), *restricted_arguments(key))


def load_arguments(models: Sequence[str]) -> tuple[str, ...]:
    """Return tritonserver's options that load these models, and no other of the repository."""
    return ("--model-control-mode=explicit", *(f"--load-model={model}" for model in models))


class RepositoryApi:
    """Triton at an address. models: each before those that call it."""

    def __init__(self, address: Address, key: str, models: Sequence[str] = (MODEL,)) -> None:
        self._address = address
        self._key = key
        self.models = tuple(models)

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
        """Return whether every model takes requests; False also without an answer."""
        try:
            return all(self._ask("GET", f"/v2/models/{name}/ready", _ANSWER_S).status == 200 for name in self.models)
        except ApiError:
            return False

    def unload(self, model: str = MODEL) -> None:
        """Start unloading a model; returns before it is unloaded. Raises ApiError."""
        answer = self._ask("POST", f"/v2/repository/models/{model}/unload", _UNLOAD_ANSWER_S)
        if answer.status != 200:
            raise _unexpected(answer)

    def model_is_loaded(self, model: str = MODEL) -> bool:
        """Return whether a model still runs, if only for accepted requests. Raises ApiError."""
        answer = self._ask("POST", "/v2/repository/index", _ANSWER_S)
        try:
            entries = json.loads(answer.body)
            states = [entry.get("state") for entry in entries if entry["name"] == model]
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
