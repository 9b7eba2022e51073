"""The digest that names a checkpoint in receipts: SHA-256 of its files' names and contents."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from llama_engine.model.checkpoint_files import JSON_FILES, weight_files


def checkpoint_files(folder: Path, gguf: Path | None) -> list[Path]:
    """Return the files that determine a checkpoint's tokens. gguf: its GGUF file, None for safetensors."""
    small = [folder / name for name in JSON_FILES if (folder / name).is_file()]
    return [*small, *(weight_files(folder) if gguf is None else [gguf])]


class CheckpointDigest:
    """The digest of a checkpoint. Its files are read in a thread, when it is first needed."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._digest: Future[str] | None = None

    def wait(self, seconds: float) -> str:
        """Return the digest, in hexadecimal. The call that starts the reading waits, others return at once.

        Raises TimeoutError while the files are being read, OSError for an unreadable file.
        """
        with self._lock:
            starts = self._digest is None or (self._digest.done() and self._digest.exception() is not None)
            if starts or self._digest is None:
                self._digest = Future()
            digest = self._digest
        if starts:
            threading.Thread(target=self._read, args=(digest,), name="digest", daemon=True).start()
        return digest.result(seconds if starts else 0)

    def _read(self, digest: Future[str]) -> None:
        try:
            digest.set_result(_digest({path.name: sha256_of(path) for path in self._files}))
        except BaseException as error:  # noqa: BLE001 - any failure: a request waits for it
            digest.set_exception(error)


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(hashes: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
