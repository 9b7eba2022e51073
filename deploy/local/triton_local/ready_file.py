"""The file that tells other programs where a ready server listens: there while the server is, whole or not at all."""

import json
import os
import tempfile
from pathlib import Path

from triton_local.errors import InvalidSettingError
from triton_local.server import LocalTriton


def remove_ready_file(path: Path) -> None:
    """Remove it, also one that an earlier run left. Raises InvalidSettingError when the place can't be used."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidSettingError(f"ready file {path} can't be written: {error.strerror}") from error


def write_ready_file(path: Path, server: LocalTriton, variant: str) -> None:
    """Write {"http", "grpc", "metrics": "host:port", "pid": tritonserver's, "variant"} under `path` in one step.

    A service that was turned off is left out. Raises InvalidSettingError when it can't be written.
    """
    facts: dict[str, str | int] = {**dict(server.urls.items()), "pid": server.pid, "variant": variant}
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
            # mkstemp's mode is 0600; other users' programs may read where a server listens.
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidSettingError(f"ready file {path} can't be written: {error.strerror}") from error
