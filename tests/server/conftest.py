"""Fixtures of the shared servers, one for each plan of the fleet; a failed test shows the logs of those in use."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Literal

import pytest
from server.fleet import PLANS, Fleet
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
    with Fleet(list(order), tmp_path_factory.mktemp) as servers:
        yield servers


def _needs(item: pytest.Item) -> list[str]:
    assert isinstance(item, pytest.Function)
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [name for name in (*item.fixturenames, *parameters) if isinstance(name, str) and name in PLANS]


def _fleet_fixture(name: str, scope: Literal["session", "module"]) -> object:
    @pytest.fixture(scope=scope, name=name)
    def server(fleet: Fleet) -> Iterator[LocalTriton]:
        with fleet.server(name) as started:
            yield started

    return server


triton = _fleet_fixture("triton", "session")
streaming = _fleet_fixture("streaming", "session")
fp32 = _fleet_fixture("fp32", "session")
fp32_streaming = _fleet_fixture("fp32_streaming", "module")
faulty = _fleet_fixture("faulty", "module")
faulty_default = _fleet_fixture("faulty_default", "module")
split = _fleet_fixture("split", "module")
stopping = _fleet_fixture("stopping", "module")
stopping_streaming = _fleet_fixture("stopping_streaming", "module")
unloaded = _fleet_fixture("unloaded", "module")
unloaded_streaming = _fleet_fixture("unloaded_streaming", "module")
stopped = _fleet_fixture("stopped", "module")
fuzzed = _fleet_fixture("fuzzed", "module")
fuzzed_streaming = _fleet_fixture("fuzzed_streaming", "module")


@pytest.fixture(scope="session", params=["narrow", "narrow_streaming"])
def narrow(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[LocalTriton]:
    """Two slots and a queue of three, under the default and the streaming config."""
    with fleet.server(request.param) as server:
        yield server


@pytest.fixture(params=["triton", "streaming"])
def either(request: pytest.FixtureRequest) -> LocalTriton:
    """The default config, then the streaming one."""
    server: LocalTriton = request.getfixturevalue(request.param)
    return server


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
