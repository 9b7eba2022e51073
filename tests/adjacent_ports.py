"""Free ports that follow each other: KV cache events take two."""

import random
from contextlib import ExitStack, suppress
from socket import create_server


def adjacent_ports(count: int) -> int:
    """Return a port that is free, as are those after it, `count` in all."""
    # Below those that the system chooses.
    for first in range(random.randrange(20_000, 30_000), 32_000, count):
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")
