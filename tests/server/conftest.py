"""The servers that the tests share, and their logs beside every failure."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from server.fleet import PLANS, Fleet
from server.servers import facts, logs
from triton_local.server import LocalTriton

# What a developer's shell says for `make serve` is not what is tested.
for name in [name for name in os.environ if name.startswith("LLAMA_")]:
    del os.environ[name]


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Every server that the tests which are to run need, in their order."""
    order = dict.fromkeys(name for item in request.session.items for name in _needs(item))
    # Here, because pytest makes it on first use, and the threads that start servers would make one each.
    tmp_path_factory.getbasetemp()
    with Fleet(list(order), tmp_path_factory.mktemp) as servers:
        yield servers


def _needs(item: pytest.Item) -> list[str]:
    assert isinstance(item, pytest.Function)
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [name for name in (*item.fixturenames, *parameters) if isinstance(name, str) and name in PLANS]


@pytest.fixture(scope="session")
def triton(fleet: Fleet) -> Iterator[LocalTriton]:
    """The product as it is: config.pbtxt, INT8, the embedded checkpoint."""
    with fleet.server("triton") as server:
        yield server


@pytest.fixture(scope="session")
def streaming(fleet: Fleet) -> Iterator[LocalTriton]:
    """The product, streaming: configs/streaming.pbtxt, INT8, 32 slots."""
    with fleet.server("streaming") as server:
        yield server


@pytest.fixture(scope="session", params=["narrow", "narrow_streaming"])
def narrow(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[LocalTriton]:
    """A server of two slots with a queue of three, in one response and in pieces."""
    with fleet.server(request.param) as server:
        yield server


@pytest.fixture(scope="session")
def fp32(fleet: Fleet) -> Iterator[LocalTriton]:
    """Weights of FP32, which say what transformers says; eight slots, small prefills."""
    with fleet.server("fp32") as server:
        assert "linear layers 43 in float32" in facts(server)
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"tritonserver, {name}", log) for name, log in logs().items()]
    return report
