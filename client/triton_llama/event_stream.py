"""The responses of /generate_stream: server-sent events, decoded to pieces and bounded in size."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping

import httpx
from httpx_sse import ServerSentEvent

from triton_llama.completion import Piece
from triton_llama.errors import ServerError
from triton_llama.tensors import read_piece
from triton_llama.translate import from_generate_response, from_stream_error

EVENT_STREAM = "text/event-stream"
LARGEST_EVENT = 4 * 2**20
"""Bytes of one event; Triton's longest is a whole text with its prompt."""
LARGEST_ERROR = 65536
"""Bytes to read of a response other than 200."""

_EVENT_END = re.compile(rb"\n\n|\r\r|\r\n\r\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class PieceReader(httpx.AsyncByteStream):
    """Decodes the events of one response, and bounds their size: httpx-sse itself reads an event of any size.

    As the response's stream it removes a byte order mark and counts the bytes since the last event.
    """

    def __init__(self, response: httpx.Response) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._stream = response.stream
        self._bounded = response.status_code == 200
        self._head: bytes | None = b""
        self._tail = b""
        self._pending = 0
        self._started = False
        response.stream = self
        # One character per byte, so that `piece` gets the bytes back. Events are UTF-8, whatever the response's charset
        # is, and httpx would replace bytes that are not.
        response.encoding = "iso-8859-1"

    def piece(self, event: ServerSentEvent) -> Piece | None:
        """Decode an event, None if it has no `data` field; raises TritonLlamaError for an error or a violation."""
        # A `data` field may be empty. Such an event differs from one without that field only in what else it lacks.
        if not event.data and (event.event != "message" or event.id or event.retry is not None):
            return None
        fields = _read_fields(event.data.encode("iso-8859-1"))
        if "error" in fields:
            raise from_stream_error(str(fields["error"]), started=self._started)
        self._started = True
        return read_piece(fields)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield self._checked(chunk)

    def _checked(self, chunk: bytes) -> bytes:
        if self._head is not None:
            self._head += chunk
            if len(self._head) < len(_BYTE_ORDER_MARK):
                return b""
            chunk, self._head = self._head.removeprefix(_BYTE_ORDER_MARK), None
        # Comments (keep-alives) end with an empty line too.
        window = self._tail + chunk
        ends = [match.end() for match in _EVENT_END.finditer(window)]
        self._pending = len(window) - ends[-1] if ends else self._pending + len(chunk)
        self._tail = window[-3:]
        if self._pending > LARGEST_EVENT and self._bounded:
            raise ServerError(f"the server sent an event of more than {LARGEST_EVENT} bytes")
        return chunk

    async def aclose(self) -> None:
        """Close the response."""
        await self._stream.aclose()


async def check_response(response: httpx.Response) -> None:
    """Check that a response is a stream of events; raises the TritonLlamaError that it is otherwise."""
    if response.status_code != 200:
        body = b""
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > LARGEST_ERROR:
                break
        # Triton's own errors come as JSON, the model's as an event.
        raise from_generate_response(response.status_code, body.strip().removeprefix(b"data:"))
    kind = response.headers.get("content-type", "")
    if not kind.startswith(EVENT_STREAM):
        raise ServerError(f"the answer's type is {kind!r}, must be {EVENT_STREAM}")


def _read_fields(data: bytes) -> Mapping[str, object]:
    try:
        fields = json.loads(data)
    # JSON nested too deep is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ServerError(f"the server sent an event that is not JSON: {data[:80]!r}") from error
    if not isinstance(fields, dict):
        raise ServerError(f"the server sent the event {data[:80]!r}, must be a JSON object")
    return fields
