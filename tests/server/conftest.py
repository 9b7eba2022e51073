"""Fixtures of the servers, one for each plan of the fleet; a failed test shows the logs of those in use."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing

import pytest
from server.fleet import PLANS, SHARED, Fleet
from server.metrics import Metrics
from server.servers import logs
from triton_local.server import LocalTriton

# Settings that a developer exports for `make serve` don't apply to tests.
for name in [name for name in os.environ if name.startswith("LLAMA_")]:
    del os.environ[name]


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The servers that the selected tests need, started in the order of those tests."""
    order = dict.fromkeys(name for item in request.session.items for name in _needs(item))
    # pytest creates it on first use; each of the threads that start servers would create its own.
    tmp_path_factory.getbasetemp()
    with closing(Fleet(list(order), tmp_path_factory.mktemp)) as servers:
        yield servers


def _needs(item: pytest.Item) -> list[str]:
    assert isinstance(item, pytest.Function)
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [name for name in (*item.fixturenames, *parameters) if isinstance(name, str) and name in PLANS]


def _fleet_fixture(name: str) -> object:
    @pytest.fixture(scope="session" if name in SHARED else "module", name=name)
    def server(fleet: Fleet) -> Iterator[LocalTriton]:
        with fleet.server(name) as started:
            yield started

    return server


for name in PLANS:
    globals()[name] = _fleet_fixture(name)


def _named(request: pytest.FixtureRequest) -> LocalTriton:
    named: LocalTriton = request.getfixturevalue(request.param)
    return named


server = pytest.fixture(_named, name="server")
"""The server that an indirect parameter names."""

either = pytest.fixture(_named, params=["triton", "streaming"], name="either")
"""The default config, then the streaming one."""

narrow = pytest.fixture(_named, params=["narrow_default", "narrow_streaming"], name="narrow")
"""Two slots and a queue of three, under the default and the streaming config."""


@pytest.fixture
def metrics(narrow: LocalTriton) -> Metrics:
    """The narrow server's metrics, counted from the beginning of the test."""
    return Metrics(narrow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"tritonserver, {name}", log) for name, log in logs().items()]
    return report
