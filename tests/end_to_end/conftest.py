"""A fixture for each of the planned servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from collector import Collector, collector
from end_to_end.metrics import Metrics
from end_to_end.plans import PLANS, SHARED, SOON, planned
from end_to_end.servers import in_front_of
from frontend.endpoints import Endpoint
from triton_local.server import LocalTriton

# Settings that a developer exports for `make serve` don't apply to tests.
for name in [name for name in os.environ if name.startswith("LLAMA_")]:
    del os.environ[name]


# What needs Docker, the environments of other people's clients, or a browser.
LONG = [Path(__file__).parent / folder for folder in ("compose", "clients", "browser")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent in LONG:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def ending() -> Iterator[ExitStack]:
    """Waits at the end of the run for servers that were told to end: each takes five seconds, mostly waiting."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def spans() -> Iterator[Collector]:
    """What `streaming` sends its spans to: those of requests that come with a trace."""
    with collector() as came:
        yield came


def _server_fixture(name: str) -> object:
    @pytest.fixture(scope="session" if name in SHARED else "module", name=name)
    def server(
        request: pytest.FixtureRequest, ending: ExitStack, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[LocalTriton]:
        traces = {"LLAMA_TRACES": request.getfixturevalue("spans").url, **SOON} if PLANS[name].traced else {}
        started = ending.enter_context(planned(name, tmp_path_factory.mktemp(name), traces))
        yield started
        started.terminate()

    return server


for name in PLANS:
    globals()[name] = _server_fixture(name)


@pytest.fixture(scope="session")
def served(streaming: LocalTriton) -> Iterator[Endpoint]:
    """The OpenAI endpoint with its default settings."""
    with in_front_of(streaming) as endpoint:
        yield endpoint


def _named(request: pytest.FixtureRequest) -> LocalTriton:
    named: LocalTriton = request.getfixturevalue(request.param)
    return named


server = pytest.fixture(_named, name="server")
"""The server that an indirect parameter names."""

narrow = pytest.fixture(_named, params=["narrow_default", "narrow_streaming"], name="narrow")
"""Two slots and a queue of three, under the default and the streaming config."""


@pytest.fixture
def metrics(narrow: LocalTriton) -> Metrics:
    """The narrow server's metrics, counted from the beginning of the test."""
    return Metrics(narrow)
