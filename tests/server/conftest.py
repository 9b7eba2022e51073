"""The servers that the tests share, and their logs beside every failure."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from server.repositories import copy_repository
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


@pytest.fixture(scope="session")
def streaming() -> Iterator[LocalTriton]:
    """The product, streaming: configs/streaming.pbtxt, INT8, 32 slots."""
    with serve("streaming") as server:
        yield server


@pytest.fixture(scope="session", params=["default", "streaming"])
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTriton]:
    """A server of two slots with a queue of three, in one response and in pieces."""
    repository = copy_repository(
        tmp_path_factory.mktemp(f"narrow_{request.param}"),
        queue_policy="max_queue_size: 3, timeout_action: REJECT, allow_timeout_override: true, "
        # Triton takes a request's own timeout only where it is shorter than this one; 0 is none.
        "default_timeout_microseconds: 600000000",
    )
    with serve(request.param, repository=repository, environment={"LLAMA_SLOTS": "2"}) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"tritonserver, {name}", log) for name, log in logs().items()]
    return report
