"""Readiness of a starting server, and the file that tells other programs where a ready one listens."""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
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


def remove_ready_file(path: Path) -> None:
    """Remove the file, also an earlier run's. Raises InvalidSettingError if the folder can't be written."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidSettingError(f"ready file {path} can't be written: {error.strerror}") from error


def write_ready_file(path: Path, urls: Mapping[Service, str], pid: int, variant: str) -> None:
    """Write {"http", "grpc", "metrics", "openai": "host:port", "pid": tritonserver's, "variant"} to `path`, atomically.

    A service that is off is missing. Raises InvalidSettingError if the file can't be written.
    """
    facts: dict[str, str | int] = {**dict(urls.items()), "pid": pid, "variant": variant}
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
            # mkstemp's mode is 0600; other users may read where a server listens.
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidSettingError(f"ready file {path} can't be written: {error.strerror}") from error
