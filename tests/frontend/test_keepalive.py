"""A machine that vanishes: the connection to it ends, though nothing closes it."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from frontend.endpoints import HOST, endpoint, text_of
from frontend.fake_triton import FakeTriton


class Forwarder:
    """A TCP port in front of another one."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._peers: dict[socket.socket, socket.socket] = {}
        self._silent: dict[socket.socket, socket.socket] = {}
        self._becomes_silent = threading.Event()
        self._is_open = True

    def silence(self) -> None:
        """Pass nothing more on over the connections that there are."""
        self._becomes_silent.set()
        latest = time.monotonic() + 20
        while self._becomes_silent.is_set():
            assert time.monotonic() < latest, "the forwarder has ended"
            time.sleep(0.01)

    def run(self) -> None:
        """Pass everything on until it is closed."""
        while self._is_open:
            # This thread alone changes the connections: another one would do it between two lines of `_pass_on`.
            if self._becomes_silent.is_set():
                self._silent, self._peers = self._peers, {}
                self._becomes_silent.clear()
            for ready in select.select([self._listener, *self._peers], [], [], 0.01)[0]:
                if ready is self._listener or ready in self._peers:
                    self._pass_on(ready)
        for connection in (self._listener, *self._peers, *self._silent):
            connection.close()

    def close(self) -> None:
        """End `run`."""
        self._is_open = False

    def _pass_on(self, ready: socket.socket) -> None:
        if ready is self._listener:
            client, server = ready.accept()[0], socket.create_connection((HOST, self._target))
            self._peers |= {client: server, server: client}
        elif received := ready.recv(65536):
            self._peers[ready].sendall(received)
        else:
            for connection in (ready, self._peers.pop(ready)):
                self._peers.pop(connection, None)
                connection.close()


@contextmanager
def _forwarding(port: int) -> Iterator[Forwarder]:
    forwarder = Forwarder(port)
    thread = threading.Thread(target=forwarder.run)
    thread.start()
    try:
        yield forwarder
    finally:
        forwarder.close()
        thread.join()


@pytest.mark.long
def test_a_stream_to_a_silent_machine_goes_on_within_30_s(own: FakeTriton) -> None:
    own.hold_after = 2
    with _forwarding(own.port) as forwarder, endpoint(forwarder.port, resume_timeout=20) as served:

        def vanish() -> None:
            own.wait_for(lambda fake: fake.running == 1)
            forwarder.silence()
            own.hold_after = None

        vanishing = threading.Thread(target=vanish)
        vanishing.start()
        began = time.monotonic()
        assert text_of(served.complete()) == " Hello, world."
        assert 10 < time.monotonic() - began < 30
        vanishing.join()
