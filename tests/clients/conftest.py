"""The endpoint in front of a real server under the config streaming, for clients as they are published."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from server.openai_endpoint import in_front_of
from server.plans import copy_repository
from server.servers import in_use, logs, new_server

# Settings that a developer exports for `make serve` don't apply to tests.
for name in [name for name in os.environ if name.startswith("LLAMA_")]:
    del os.environ[name]


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a client of OpenAI's protocol is given."""
    # On a busy machine the tokens of a quick answer come in one event.
    repository = copy_repository(tmp_path_factory.mktemp("repository"), "slow_model")
    with (
        new_server("streaming", repository=repository) as server,
        in_use("streaming", server),
        in_front_of(server, stream_interval_ms=0) as endpoint,
    ):
        yield endpoint.base_url


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"tritonserver, {name}", log) for name, log in logs().items()]
    return report
