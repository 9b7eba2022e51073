"""Readiness of a starting server, and the file that tells other programs where a ready one listens."""

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from triton_llama.health import Address, NoAnswerError, exchange
from triton_supervisor.sockets import listening_ports

from triton_local.errors import InvalidSettingError
from triton_local.ports import Service
from triton_local.repository import MODEL_NAME

_SERVER_READY = "/v2/health/ready"
_ANSWER_TIMEOUT_S = 2.0


def is_ready(
    pid: int, host: str, http_port: int, all_ports: Iterable[int], models: Sequence[str] = (MODEL_NAME,)
) -> bool:
    """Return whether process `pid` listens on `all_ports`, and `http_port` answers that server and models are ready.

    Who listens is checked because another Triton on a taken port would answer too.
    """
    paths = (_SERVER_READY, *(f"/v2/models/{name}/ready" for name in models))
    return listening_ports(pid).issuperset(all_ports) and all(
        _answers_ok(Address(host, http_port), path) for path in paths
    )


def _answers_ok(http: Address, path: str) -> bool:
    try:
        return exchange(http, "GET", path, _ANSWER_TIMEOUT_S).status == 200
    except NoAnswerError:
        return False


class ReadyFile:
    """{"http", "grpc", "metrics", "openai": "host:port", "pid": tritonserver's, "variant"}, while the server is ready.

    path: None for no file. say: takes a line if it can't be written after a restart.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._lock = threading.Lock()
        self._facts: Callable[[], dict[str, str | int]] | None = None
        # The server may die before the first `write`.
        self._serves = True

    def write(self, urls: Mapping[Service, str], pid: Callable[[], int], variant: str) -> None:
        """Write it, once the server serves. pid: called whenever it is written. A service that is off is missing.

        Raises InvalidSettingError if the file can't be written.
        """
        with self._lock:
            self._facts = lambda: {**dict(urls.items()), "pid": pid(), "variant": variant}
            if self._serves:
                self._place()

    def remove(self) -> None:
        """Remove it, also an earlier run's. Raises InvalidSettingError if the folder can't be written."""
        with self._lock:
            self._facts = None
            self._unlink()

    def server_serves(self, serves: bool) -> None:
        """Follow a server that is started again: remove the file, and write it when the server is ready again."""
        with self._lock:
            self._serves = serves
            if self._facts is not None:
                try:
                    self._place() if serves else self._unlink()
                except InvalidSettingError as error:
                    self._say(str(error))

    def _unlink(self) -> None:
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise InvalidSettingError(f"ready file {self._path} can't be written: {error.strerror}") from error

    def _place(self) -> None:
        """Write the file atomically."""
        if self._path is None or self._facts is None:
            return
        try:
            handle, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(json.dumps(self._facts()) + "\n")
                # mkstemp's mode is 0600; other users may read where a server listens.
                Path(name).chmod(0o644)
                Path(name).replace(self._path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise InvalidSettingError(f"ready file {self._path} can't be written: {error.strerror}") from error
