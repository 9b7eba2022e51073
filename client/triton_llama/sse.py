"""Server-sent events: bytes in as they come, each event's data out as soon as it is whole.

After the WHATWG's HTML standard, section 9.2.6. Only `data` counts here: Triton sends no other field. Knows neither
JSON nor what an event means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from triton_llama.errors import ServerError

LARGEST_EVENT = 4 * 2**20
"""Bytes of one event; Triton's longest is a whole text with its prompt."""

# Counted for each line beside its bytes, as empty ones take memory too.
_LINE_BYTES = 32
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")


class EventReader:
    """Takes the chunks of one stream, wherever they were split."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._after_cr = False
        self._first_line = True

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that this chunk ends; its lines are joined by line feeds.

        Raises:
            ServerError: an event is larger than `LARGEST_EVENT`.
        """
        if not chunk:
            return
        if self._after_cr and chunk.startswith(b"\n"):
            # The second half of a line end that the chunks' border split.
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        first, *others = _LINE_END.split(chunk)
        self._extend(first)
        for part in others:
            data = self._end_line()
            if data is not None:
                yield data
            self._extend(part)

    def _extend(self, part: bytes) -> None:
        if self._data_bytes + len(self._line) + len(part) > LARGEST_EVENT:
            raise ServerError(f"the server sent an event of more than {LARGEST_EVENT} bytes")
        self._line += part

    def _end_line(self) -> bytes | None:
        """Take in the line that ends here; a blank one ends the event and returns its data, if it had any."""
        line, self._line = bytes(self._line), bytearray()
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if not self._data:
                return None
            data, self._data, self._data_bytes = b"\n".join(self._data), [], 0
            return data
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + _LINE_BYTES
        return None
