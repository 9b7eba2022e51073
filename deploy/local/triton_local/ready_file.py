"""The file that tells other programs where a ready server listens."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from triton_local.errors import InvalidSettingError


class ReadyFile:
    """{"http", "grpc", "metrics", "openai": "host:port", "pid": tritonserver's, "variant"}, while the server is ready.

    Methods raise InvalidSettingError where the folder can't be written.
    """

    def __init__(self, path: Path | None) -> None:
        """path: None for no file."""
        self._path = path
        self._written: Mapping[str, str | int] | None = None

    def show(self, content: Mapping[str, str | int] | None) -> None:
        """Write the content if it has changed, atomically; None removes the file, also an earlier run's."""
        if self._path is None or (content is not None and content == self._written):
            return
        try:
            if content is None:
                self._path.unlink(missing_ok=True)
            else:
                self._write(self._path, content)
        except OSError as error:
            raise InvalidSettingError(f"ready file {self._path} can't be written: {error.strerror}") from error
        self._written = content

    @staticmethod
    def _write(path: Path, content: Mapping[str, str | int]) -> None:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
            # mkstemp's mode is 0600; other users may read where a server listens.
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
