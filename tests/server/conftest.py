"""The servers that the tests share, and their logs beside every failure."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from server.servers import logs, serve
from triton_local.server import LocalTriton

# What a developer's shell says for `make serve` is not what is tested.
for name in [name for name in os.environ if name.startswith("LLAMA_")]:
    del os.environ[name]


@pytest.fixture(scope="session")
def triton() -> Iterator[LocalTriton]:
    """The product as it is: config.pbtxt, INT8, the embedded checkpoint."""
    with serve() as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"tritonserver, {name}", log) for name, log in logs().items()]
    return report
