"""A file of answers, OpenAI's lines of a batch's output. It is only appended to, so that a kill loses no line."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Set
from pathlib import Path
from typing import Self

from triton_llama.batch.request_lines import parse_object
from triton_llama.errors import RejectedInputError

ID_PREFIX = "batch_req_"
_BEGINNING = b'{"id": "batch_req_'


class AnswerFile:
    """An open file of answers, new or old, which no other run writes meanwhile; a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, BlockingIOError while another run has it."""
        self._path = path
        self._file = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def repair_and_read_ids(self, expected: Set[str]) -> set[str]:
        """Return the custom_ids that have an answer; remove a last line that a kill has cut off.

        Raises RejectedInputError for a malformed line, and for a custom_id that isn't an expected one.
        """
        custom_ids: set[str] = set()
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            place = f"{self._path}:{number}"
            if not line.endswith(b"\n") and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
                self._file.truncate(self._file.seek(-len(line), os.SEEK_END))
                break
            custom_id = str(parse_object(line, place).get("custom_id"))
            if custom_id not in expected:
                raise RejectedInputError(f"{place}: custom_id is {custom_id!r}; no line of the batch has it")
            custom_ids.add(custom_id)
            if not line.endswith(b"\n"):
                # Another program wrote this last line; the next answer must not continue it.
                self._file.write(b"\n")
        return custom_ids

    def append(self, answer: dict[str, object]) -> None:
        """Write a line, an object that begins with its id; it is on the disk when this returns."""
        self._file.write(json.dumps(answer).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
