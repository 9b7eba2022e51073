"""KV cache events: which pages are cached, published over ZMQ in vLLM's format, for routers that look for a prefix.

A message has three frames: the topic, its sequence number, and MessagePack of [time, events, data-parallel rank]. A
second socket, at the next port, replays the messages from a sequence number on. A block is a page; its hash is a part
of the page's digest, and opaque to routers.

The engine's thread appends events to a deque, which needs no lock. A thread of its own sends those of an interval as
one message. Where it can't keep up, all pending events become one that says that nothing is cached: a subscriber then
knows too little, and nothing that is wrong.

Source: vLLM's `vllm.distributed.kv_events`, since 0.24, where events are maps and a replay has the topic.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from llama_engine.errors import InvalidSettings

if TYPE_CHECKING:
    from llama_engine.engine.sequence import Sequence

MAX_PENDING = 10_000
"""Events that wait to be sent."""

KEPT_MESSAGES = 10_000
"""Latest messages that can be replayed."""

INTERVAL_MS = 10
"""Time between two messages, and until a replay begins."""

CLOSE_SECONDS = 5.0

_MEDIUM = "GPU"
"""In the format the memory that attention reads, on a CPU, too."""

_CLEARED: dict[str, object] = {"type": "AllBlocksCleared"}
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_log = logging.getLogger(__name__)


class KvEvents:
    """Publishes the events of one KV cache. Its methods are for one thread, and never block, but for `close`."""

    def __init__(self, address: str, page_size: int) -> None:
        """Bind the sockets and start the thread. address: tcp://HOST:PORT or tcp://HOST:PORT/TOPIC.

        Raises InvalidSettings if an address can't be bound or a package is missing.
        """
        try:
            import zmq
            from msgspec.msgpack import encode
        except ImportError as error:
            raise InvalidSettings("kv_events needs pyzmq and msgspec: pip install pyzmq msgspec") from error
        endpoint, _, topic = address.removeprefix("tcp://").partition("/")
        host, port = endpoint.split(":")
        replay_endpoint = f"{host}:{int(port) + 1}"
        if not host.startswith("127.") and host != "localhost":
            _log.warning("KV cache events show all prompts and answers to anyone who reaches %s", endpoint)
        self._page_size, self._encode = page_size, encode
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._publisher, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        # Beyond its limit a socket drops messages: a replay needs all of them and its end.
        self._replay.set_hwm(KEPT_MESSAGES + 1)
        try:
            self._publisher.bind(f"tcp://{endpoint}")
            self._replay.bind(f"tcp://{replay_endpoint}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidSettings(f"kv_events is {address!r}: {error}") from error
        _log.info("KV cache events at %s, replayed at %s", endpoint, replay_endpoint)
        self._pending = deque[dict[str, object]]()
        self._dropped = 0
        self._sent = deque[tuple[int, bytes]](maxlen=KEPT_MESSAGES)
        self._number = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def stored(self, sequence: Sequence, pages: list[int]) -> None:
        """Publish that full pages of a sequence are cached. pages: their indices, ascending; each run is one event."""
        first = 0
        for end in range(1, len(pages) + 1):
            if end == len(pages) or pages[end] > pages[end - 1] + 1:
                self._append(self._stored(sequence, pages[first:end]))
                first = end

    def removed(self, digest: bytes) -> None:
        """Publish that the page with this digest is cached no more."""
        self._append({"type": "BlockRemoved", "block_hashes": [_hash(digest)], "medium": _MEDIUM})

    def take_dropped(self) -> int:
        """Return how many events were dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def close(self) -> None:
        """Send what is pending, and end the thread; wait at most CLOSE_SECONDS for it."""
        self._closing = True
        self._thread.join(CLOSE_SECONDS)

    def _stored(self, sequence: Sequence, run: list[int]) -> dict[str, object]:
        first, last = run[0], run[-1]
        salt, adapter = sequence.request.cache_salt, sequence.request.adapter
        names = [adapter.name] if adapter else []
        return {
            "type": "BlockStored",
            "block_hashes": [_hash(sequence.page_digests[page]) for page in run],
            "parent_block_hash": _hash(sequence.page_digests[first - 1]) if first else None,
            "token_ids": sequence.tokens(first * self._page_size, (last + 1) * self._page_size),
            "block_size": self._page_size,
            "lora_id": (adapter.number or None) if adapter else None,
            "medium": _MEDIUM,
            "lora_name": adapter.name if adapter else None,
            "extra_keys": [[*names, salt] if salt and not page else names or None for page in run],
        }

    def _append(self, event: dict[str, object]) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._dropped += len(self._pending)
            self._pending.clear()
            self._pending.append(_CLEARED)
        self._pending.append(event)

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._replay.poll(INTERVAL_MS):
                    self._replay_messages()
                self._send_pending()
            self._send_pending()
        except Exception:  # noqa: BLE001 - the engine works without events
            _log.exception("KV cache events are no longer published")
        finally:
            self._context.destroy(linger=INTERVAL_MS)

    def _send_pending(self) -> None:
        events = []
        with suppress(IndexError):
            while True:
                events.append(self._pending.popleft())
        if not events:
            return
        if _CLEARED in events:
            _log.warning("KV cache events were dropped; subscribers start anew")
        message = self._encode([time.time(), events, 0])
        self._sent.append((self._number, message))
        self._publisher.send_multipart([self._topic, self._number.to_bytes(8, "big"), message])
        self._number += 1

    def _replay_messages(self) -> None:
        """Send a subscriber the kept messages from the number on that its request ends with, then the end mark."""
        *route, frame = self._replay.recv_multipart()
        first = int.from_bytes(frame, "big")
        for number, message in self._sent:
            if number >= first:
                self._replay.send_multipart([*route, self._topic, number.to_bytes(8, "big"), message])
        self._replay.send_multipart([*route, b"", _END_OF_REPLAY, b""])


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
