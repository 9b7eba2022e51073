"""An endpoint in front of several Tritons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from frontend.endpoints import HOST, Endpoint, endpoint
from frontend.fake_triton import FakeTriton
from httpx import Response

Pair = tuple[FakeTriton, FakeTriton]


@contextmanager
def in_front_of(*tritons: FakeTriton, **changes: object) -> Iterator[Endpoint]:
    """Serve in front of several Tritons."""
    addresses = ",".join(f"{HOST}:{triton.port}" for triton in tritons)
    with endpoint(0, triton=addresses, **{"resume_timeout": 20, **changes}) as served:
        yield served


@contextmanager
def homed(pair: Pair, **changes: object) -> Iterator[tuple[Endpoint, FakeTriton, FakeTriton]]:
    """Serve in front of both; yields the endpoint, the Triton that gets `served.complete()`, and the other one."""
    with in_front_of(*pair, **changes) as served:
        assert served.complete().status_code == 200
        home, other = sorted(pair, key=lambda triton: -len(triton.requests))
        home.requests.clear()
        yield served, home, other


def text_of(response: Response) -> str:
    """Return the text of a completion."""
    return str(response.json()["choices"][0]["text"])


def resumptions_of(served: Endpoint) -> dict[str, float]:
    """Return the resumptions by outcome."""
    lines = [line for line in served.http.get("/metrics").text.splitlines() if "_resumptions_total{" in line]
    return {line.split('"')[1]: float(line.split()[1]) for line in lines}
